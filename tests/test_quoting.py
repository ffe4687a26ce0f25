"""What others said reaches a terminal as text, never as its commands."""

import pickle
from pathlib import Path

import pytest
import torch
from small_runs import fresh, trained
from torch import nn

from dlion import Distributed, checkpoint
from dlion.checkpoint.crew import ALONE
from dlion.errors import AgreementError, CheckpointError, DlionError
from dlion.quoting import one_line, shortened, visible

BOLD = "\x1b[1mWeightsUnpickler\x1b[0m error"


def test_styles_go_and_other_control_characters_are_shown() -> None:
    assert visible(BOLD) == "WeightsUnpickler error"
    assert visible("a\x1b]0;title\x07b\u202e\n") == r"a\x1b]0;title\x07b\u202e\n"
    assert visible("straße 北京") == "straße 北京"
    assert visible(visible(BOLD + "\x07")) == visible(BOLD + "\x07")
    assert one_line(f"one\n\n  two\t{BOLD}", 20) == "one two WeightsUnpic..."
    assert shortened("a  b", 4) == "a  b"


def test_no_error_of_ours_holds_what_a_terminal_would_obey() -> None:
    for kind in (DlionError, AgreementError, CheckpointError):
        error = kind(f"rank 1 said {BOLD}\x07")
        assert str(error) == r"rank 1 said WeightsUnpickler error\x07"
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert DlionError(3).args == (3,)


def test_what_torch_says_of_extra_and_of_files_is_text(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    with pytest.raises(CheckpointError, match="holds what cannot be loaded without running its code") as error:
        checkpoint.save(tmp_path / "a", model, optimizer, extra={"model": model})
    assert str(error.value).isprintable()
    with pytest.raises(CheckpointError, match="Sequential") as error:
        checkpoint.save(tmp_path / "a", model, optimizer, notes={"\x1b[1m": model})
    assert str(error.value).isprintable()
    odd = tmp_path / "\x1b[31mred\n"
    for look in (checkpoint.verify, lambda path: checkpoint.load(path, model, optimizer)):
        with pytest.raises(CheckpointError, match=r"red.* holds no complete checkpoint") as error:
            look(odd)
        assert str(error.value).isprintable()


def test_names_in_a_checkpoint_and_what_a_worker_raises_are_text(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("a\x1b[2J", nn.Parameter(torch.zeros(1)))

    checkpoint.save(tmp_path / "a", model, Distributed(model.parameters()))
    other = fresh()
    with pytest.raises(CheckpointError, match=r"not in this model|not in the checkpoint") as error:
        checkpoint.load(tmp_path / "a", other, Distributed(other.parameters()))
    assert str(error.value).isprintable()

    def fails() -> None:
        raise RuntimeError(f"a\nb {BOLD}")

    with pytest.raises(CheckpointError) as error:
        ALONE.told("save", fails)
    assert str(error.value) == "RuntimeError: a b WeightsUnpickler error"
