"""Guards the kernels' table of docs/benchmarks.md: it is made from files of figures and from nothing else."""

from pathlib import Path

import kernel_table
import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def run_of(value: float) -> dict[str, object]:
    settings = {"used": "native (avx2)", "params": "1e6", "dtype": "float32", "threads": "1", "torch": "2"}
    return {"ratios": {"ballot + apply / fused AdamW": value, "rate of ballot / copy": 1.5}, "settings": settings}


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ((0.7, 0.9, 0.78), "0.780 | 0.700 to 0.900 | <= 0.78 | yes"),
        ((0.7, 0.9, 0.79), "0.790 | 0.700 to 0.900 | <= 0.78 | **no**"),
    ],
)
def test_the_median_of_the_runs_is_held_to_the_target(values: tuple[float, ...], row: str) -> None:
    made = kernel_table.table([run_of(value) for value in values])
    assert f"| ballot + apply / fused AdamW | {row} |" in made
    assert "| rate of ballot / copy | 1.500 | 1.500 to 1.500 |  |  |" in made and "3 runs; native (avx2)" in made


def test_the_documents_table_is_that_of_its_results(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(DOCS.read_text(encoding="utf-8"), encoding="utf-8")
    assert kernel_table.main(["--docs", str(document)]) == 0
    assert document.read_text(encoding="utf-8") == DOCS.read_text(encoding="utf-8")


def test_without_results_there_is_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_table.main(["--results", str(tmp_path)]) == 2
    assert "run bench/kernels.py" in capsys.readouterr().err
