"""torchtitan's own trainer on a mesh of 2x2 real ranks: what differs, what is sent, what is kept, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import launch
from ranks import bytes_sent, meet_as_launched, refusal, told
from watched import digest

import scripts

pytest.importorskip("torchtitan", reason="its tests need it: see docs/integrations/torchtitan.md")
pytestmark = pytest.mark.timeout(240)  # with frameworks to import, and other work on the machine
HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
REPLICAS, SHARDS = 2, 2
STEPS, SAVED = 6, 3


def run(folder: Path, steps: int, lr: float = 1e-3, averaging: bool = False) -> dict[str, Any]:
    """Train to `steps` from where the folder's newest checkpoint is; what the ranks saw and hold in the end."""
    import titan

    from dlion.integrations.torchtitan import local_gradients, voting

    config = titan.a_run(folder, REPLICAS, steps, SAVED)
    config.optimizer = voting(lr=lr, topology="sharded", verify_every=2)
    trainer = local_gradients(config).build()
    (optimizer,) = trainer.optimizers
    params = list(trainer.model_parts[0].parameters())
    seen = []

    def look(*_: Any) -> None:
        if averaging:
            for param in params:
                dist.all_reduce(param.grad.to_local(), group=optimizer.process_group)
        seen.append([float(param.grad.to_local().abs().sum()) for param in params])

    optimizer.register_step_pre_hook(look)
    said: list[str] = []
    with told(said):
        trainer.train()
    trainer.close()
    shards = [param.to_local() for param in params]
    return {
        "said": said,
        "gradients": seen,
        "bytes": [optimizer.stats.bytes_sent, optimizer.stats.steps * bytes_sent(shards, REPLICAS)],
        "parameters": [digest([shard]) for shard in shards],
        "momenta": [digest([optimizer.state[param]["exp_avg"].to_local()]) for param in params],
        "position": [optimizer.param_groups[0]["t"], trainer.lr_schedulers.schedulers[0].last_epoch],
    }


def work(rank: int, size: int, folder: Path) -> dict[str, Any]:
    meet_as_launched(folder, rank, size)
    whole = run(folder / "whole", STEPS)
    run(folder / "halves", SAVED)
    return {
        "whole": whole,
        "again": run(folder / "halves", STEPS),
        "averaging": run(folder / "averaged", 4, averaging=True)["said"],
        "refused": refused(folder / "refused"),
    }


def refused(folder: Path) -> list[str]:
    """What is said to those who call one of two, and to those whose mesh is another one."""
    import titan
    from torchtitan.components.optimizer import default_adamw

    from dlion.integrations.torchtitan import local_gradients, voting

    def built(local: bool, optimizer: Any, **parallelism: Any) -> Any:
        config = titan.a_run(folder, REPLICAS, 1, SAVED)
        config.optimizer = optimizer
        config.parallelism = replace(config.parallelism, **parallelism)
        return (local_gradients(config) if local else config).build()

    mixed = voting()
    mixed.param_groups[0].optimizer_name = "AdamW"
    return [
        refusal(lambda: built(False, voting())),
        refusal(lambda: built(True, default_adamw(implementation="for-loop"))),
        refusal(lambda: built(True, mixed)),
        refusal(lambda: built(True, voting(overlap=True))),
        refusal(lambda: built(True, voting(), data_parallel_replicate_degree=1)),
        refusal(lambda: built(True, voting(), data_parallel_shard_degree=1, tensor_parallel_degree=2)),
        refusal(lambda: built(True, voting(), spmd_backend="spmd_types")),
    ]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp("torchtitan"), REPLICAS * SHARDS, work, seconds=220)


def test_gradients_differ_between_replicas_and_parameters_do_not(ranks: list[dict[str, Any]]) -> None:
    for shard in range(SHARDS):
        first, second = ranks[shard]["whole"], ranks[SHARDS + shard]["whole"]
        assert len(first["gradients"]) == STEPS
        assert all(a != b for a, b in zip(first["gradients"], second["gradients"], strict=True))
        assert first["parameters"] == second["parameters"] and first["momenta"] != second["momenta"]
    assert ranks[0]["whole"]["parameters"] != ranks[1]["whole"]["parameters"]
    assert not [text for rank in ranks for text in rank["whole"]["said"] if "dlion" in text]


def test_bytes_are_those_of_the_formula_for_a_ranks_own_shards(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sent, expected = rank["whole"]["bytes"]
        assert sent == expected > 0


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        allocates, *steps = rank["again"]["gradients"]
        assert not any(allocates) and steps == rank["whole"]["gradients"][SAVED:]
        for what in ("parameters", "momenta", "position"):
            assert rank["again"][what] == rank["whole"][what]


def test_averaging_between_replicas_is_reported(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert [text for text in rank["averaging"] if "averaged already" in text]


def test_what_would_average_or_train_apart_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        averaged, other, mixed, early, alone, tensor, backend = rank["refused"]
        assert averaged.startswith("this model averages its gradients between replicas")
        assert other.startswith("config.optimizer makes OptimizersContainer")
        assert mixed.startswith("a group asks for AdamW")
        assert early.startswith("overlap=True votes during backward, and torchtitan clips gradients after it")
        assert alone.startswith("data_parallel_replicate_degree=1 is one replica")
        assert tensor.startswith("tensor_parallel_degree=2: votes go with replicas and shards alone")
        assert 'set parallelism.spmd_backend="partial_dtensor"' in backend


SCRIPT = f"""
import sys
sys.path += {[str(HERE), str(EXAMPLES)]}
import titan
from torchtitan import train
train.main()
"""


def test_the_example_trains_by_torchtitans_own_command(tmp_path: Path) -> None:
    assert len((EXAMPLES / "with_torchtitan.py").read_text().splitlines()) < 60
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ("--module", "titan", "--config", "example", "--training.steps", "6")
    for said in scripts.run(script, tmp_path, *flags, size=REPLICAS * SHARDS, preload=()):
        assert not [text for text in said.warned if "dlion" in text]
    assert {path.name for path in (tmp_path / "outputs/checkpoint").iterdir()} == {"step-5", "step-6"}
