"""The paper's effects held to the studies: what counts as confirmed, and that the document shows what the files say."""

import math
from pathlib import Path

import effects
import pytest

PAGE = Path(__file__).parent.parent / "docs" / "paper-results.md"


@pytest.mark.parametrize(
    ("better", "spread", "effect", "said"),
    [
        (0.3, 0.2, "helped", "confirmed"),
        (-0.3, 0.2, "hurt", "confirmed"),
        (0.3, 0.2, "hurt", "not confirmed"),
        (-0.3, 0.2, "helped", "not confirmed"),
        (0.2, 0.2, "helped", "within noise"),
        (-0.1, 0.2, "helped", "within noise"),
        (0.3, 0.2, "mixed", "helped here"),
        (-0.3, 0.2, "mixed", "hurt here"),
        (math.nan, 0.2, "hurt", "not run yet"),
        (0.3, math.nan, "hurt", "not run yet"),  # one seed has no spread
    ],
)
def test_a_difference_counts_when_it_exceeds_its_spread(better: float, spread: float, effect: str, said: str) -> None:
    assert effects.verdict(better, spread, effect) == said


def test_the_document_shows_the_files() -> None:
    found, text = effects.all_seen(), PAGE.read_text(encoding="utf-8")
    for part, table in (("paper", effects.table_of_effects(found)), ("small", effects.table_of_differences(found))):
        assert f"<!-- effects:begin {part} -->\n{table}\n<!-- effects:end {part} -->" in text


def test_a_loss_that_falls_is_better() -> None:
    """On the study in docs/quality.md: G-Lion to MaVo, means and spread by hand from its cells."""
    results = effects.results_of("quality-text")
    assert results is not None and not results.higher_is_better
    effect = effects.Effect("", "", "", "hurt", effects.MAVO, ("quality-text",), "")
    (one,) = effects.seen_in(effect, "quality-text", results)
    rows = {row.variant: row for row in results.rows}
    before, after = (rows[name].values("val_loss") for name in ("g-lion", "dlion-mavo"))
    assert one.better == pytest.approx(sum(before) / len(before) - sum(after) / len(after))
    assert one.before == pytest.approx(sum(before) / len(before)) and one.digits == 4
