"""Guards what `dlion train --dry-run` says that a run would send: it counts with the run's own settings."""

import re

import pytest

from dlion.cli import main


@pytest.mark.parametrize(
    ("flags", "bits"),
    [
        (["--method", "dgc"], 3 * 0.064),
        (["--method", "dgc", "--keep", "0.02"], 3 * 1.28),
        (["--method", "graddrop"], 3 * 0.64),
        (["--method", "dlion-mavo", "--zeros", "exact"], 3),
        (["--method", "d-signum-avg", "--zeros", "exact"], 4.5),
    ],
)
def test_the_dry_run_counts_what_the_settings_send(flags, bits, capsys):
    assert main(["train", "--dry-run", "--workers", "4", *flags]) == 0
    (found,) = re.findall(r"a step, ([0-9.]+) bits", capsys.readouterr().out)
    assert float(found) == pytest.approx(bits, rel=0.11)  # headers, and at least one entry of every tensor
