"""Guards bench/simulator.py: it runs and says what it promises."""

import pytest
import simulator


def test_it_compares_a_step_with_the_passes_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulator.main(["--workers", "2", "--batch-size", "1", "--rounds", "1", "--method", "terngrad"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("2 simulated workers, terngrad, GPT of 480,096 parameters")
    ratio = float(told[2].split()[1])
    assert ratio > 0.5
    assert "tally" in told[3] and "peak memory" in told[4]
