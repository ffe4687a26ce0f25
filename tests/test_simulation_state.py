"""A simulation beside the exchange: buffers, low precision, states that come and go, what is refused."""

import copy
from typing import Any

import pytest
import torch
from odd_tensors import make_model, run, same, set_gradients, tensors_of
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed, synchronize_buffers
from dlion.methods import METHODS
from dlion.simulate import Simulation

STEPS = 4


class Normalised(nn.Module):
    """With statistics of its own batches, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 1))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("narrow", torch.zeros((), dtype=torch.bfloat16))

    def loss(self, rank: int, step: int) -> Tensor:
        inputs = torch.randn(9, 6, generator=torch.Generator().manual_seed(50 * step + rank))
        self.seen += rank
        self.narrow += rank
        return self.inner(inputs).square().mean()


NORMALISED = Normalised()  # made once: threads share torch's generator


def buffers_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ["dlion-avg", "g-adamw"])
def test_every_worker_has_buffers_of_its_own(method: str, workers: int) -> None:
    def work(rank: int, group: Any) -> list[list[Tensor]]:
        model = copy.deepcopy(NORMALISED)
        optimizer = Distributed(model.named_parameters(), method, lr=0.01, process_group=group)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            model.loss(rank, step).backward()
            optimizer.step()
            if step % 2:
                synchronize_buffers(model, group)
            seen.append([*buffers_of(model), *(param.detach().clone() for param in model.parameters())])
        return seen

    ranks = succeed(world(workers, work))
    model = copy.deepcopy(NORMALISED)
    simulation = Simulation(model, method, lr=0.01, workers=workers)
    for step in range(4):
        for rank in range(workers):
            with simulation.worker(rank):
                model.loss(rank, step).backward()
        simulation.step()
        if step % 2:
            simulation.synchronize_buffers()
        params = [param.detach() for param in model.parameters()]
        for rank in range(workers):
            mine = [*simulation.buffers(rank).values(), *params]
            assert all(map(same, mine, ranks[rank][step])), (rank, step)
        assert all(map(same, buffers_of(model), simulation.buffers(0).values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_is_trained_alike(dtype: torch.dtype) -> None:
    def work(rank: int, group: Any) -> list[Tensor]:
        model = make_model(dtype)
        optimizer = Distributed(model.named_parameters(), lr=0.003, process_group=group)
        for step in range(STEPS):
            set_gradients(model, rank, step)
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    first, *_ = succeed(world(3, work))
    model = make_model(dtype)
    simulation = Simulation(model, lr=0.003, workers=3)
    run(simulation, range(STEPS))
    assert all(map(same, [param.detach() for param in model.parameters()], first))


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_simulation_goes_on_to_the_bit(method: str) -> None:
    whole = Simulation(make_model(), method, workers=3, lr=0.01)
    run(whole, range(6))
    before = Simulation(make_model(), method, workers=3, lr=0.01)
    run(before, range(3))
    after = Simulation(make_model(), method, workers=3, lr=0.5)
    after.model.load_state_dict(before.model.state_dict())
    for rank in range(3):
        after.load_state_dict(before.state_dict(rank), rank)
    run(after, range(3, 6))
    assert all(map(same, whole.model.parameters(), after.model.parameters()))
    for rank in range(3):
        assert all(map(same, tensors_of(whole.state_dict(rank)), tensors_of(after.state_dict(rank))))


def test_state_that_all_workers_share_is_kept_once_and_momenta_are_not() -> None:
    for method, places in (("g-lion", 1), ("g-adamw", 1), ("dlion-mavo", 4)):
        simulation = Simulation(make_model(), method, workers=4, lr=0.01)
        run(simulation, range(2))
        found = {simulation.state_dict(rank)["state"][1]["exp_avg"].data_ptr() for rank in range(4)}
        assert len(found) == places, method


def test_a_first_step_with_learning_rate_0_only_allocates() -> None:
    simulation = Simulation(make_model(), workers=2, lr=0.0)
    run(simulation, range(1))
    assert simulation.param_groups[0]["t"] == simulation.stats.steps == 0 and simulation.state
    assert all(not momentum.any() for momentum in tensors_of(simulation.state_dict(1)))
    run(simulation, range(1, 2))
    assert simulation.param_groups[0]["t"] == simulation.stats.steps == 1


def test_parameters_may_come_and_be_frozen() -> None:
    def change(model: nn.Module, optimizer: Distributed) -> None:
        optimizer.add_param_group({"params": [model.p9], "lr": 0.5})
        model.p1.requires_grad_(False)

    def with_one_more() -> nn.Module:
        model = make_model()
        model.p9 = nn.Parameter(torch.ones(70))
        return model

    def work(rank: int, group: Any) -> list[Tensor]:
        model = with_one_more()
        optimizer = Distributed(list(model.parameters())[:-1], lr=0.01, process_group=group)
        for step in range(4):
            if step == 2:
                change(model, optimizer)
            set_gradients(model, rank, step)
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    first, *_ = succeed(world(3, work))
    model = with_one_more()
    simulation = Simulation(model, lr=0.01, workers=3, params=list(model.parameters())[:-1])
    run(simulation, range(2))
    change(model, simulation)
    run(simulation, range(2, 4))
    assert all(map(same, [param.detach() for param in model.parameters()], first))


def test_a_scheduler_of_torch_sets_everybodys_learning_rate() -> None:
    model = make_model(torch.float64)
    simulation = Simulation(model, workers=3, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(simulation, 1, 0.5)
    moved = []
    for step in range(3):
        before = model.p4.item()
        run(simulation, range(step + 10, step + 11))
        scheduler.step()
        moved.append(abs(model.p4.item() - before))
    assert moved == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("zeros", ["balanced", "exact"])
def test_fixed_ties_are_plus_one_and_nothing_else_changes(zeros: str) -> None:
    votes = torch.tensor(
        [
            [1.0, 1, 1, -1, -1, 1, 0, 0],
            [1.0, -1, 1, 1, -1, -1, 0, 1],
            [1, 1, -1, -1, -1, -1, 0, -1],
            [1, -1, 1, 1, -1, 1, 0, 0],
        ]
    )
    wanted = torch.tensor([1.0, 1, 1, 1, -1, 1, 0, 1])
    model = nn.Module()
    model.x = nn.Parameter(torch.zeros(8))
    simulation = Simulation(model, workers=4, lr=1.0, ties="fixed", zeros=zeros)
    for rank in range(4):
        with simulation.worker(rank):
            model.x.grad = votes[rank].clone()
    simulation.step()
    decided = slice(8) if zeros == "exact" else slice(6)  # a zero that must say something is another matter
    assert torch.equal(-model.x.detach()[decided], wanted[decided])
    for method in ("dlion-avg", "g-lion"):
        with pytest.raises(ValueError, match=r"ties='fixed' has no meaning with method"):
            Simulation(make_model(), method, workers=2, ties="fixed")


def test_mistakes_are_told_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="workers=0 must be a number of workers"):
        Simulation(make_model(), workers=0)
    with pytest.raises(ValueError, match="model is a generator and must be the module"):
        Simulation(make_model().parameters(), workers=2)  # type: ignore[arg-type]
    for name in ("process_group", "overlap", "timeout"):
        with pytest.raises(ValueError, match=f"{name} has no meaning where all workers compute in one process"):
            Simulation(make_model(), workers=2, **{name: None})
    simulation = Simulation(make_model(), workers=3)
    with pytest.raises(ValueError, match="worker 3 does not exist: there are workers 0 to 2"), simulation.worker(3):
        pass
    with simulation.worker(1):
        with pytest.raises(ValueError, match="worker 1 is computing"), simulation.worker(2):
            pass
        with pytest.raises(ValueError, match="worker 1 is computing"):
            simulation.step()
    with pytest.raises(ValueError, match="worker 1 has computed in this step already"), simulation.worker(1):
        pass
    with pytest.raises(ValueError, match="worker 0 has not computed in this step"):
        simulation.step()
    with pytest.raises(ValueError, match="a closure has one gradient for all workers"):
        simulation.step(lambda: 1.0)
    for rank in (0, 2):
        with simulation.worker(rank):
            pass
    simulation.param_groups[0]["lr"] = 3.0
    with pytest.raises(ValueError, match="hyper-parameters changed after the first worker"):
        simulation.step()
    with pytest.raises(ValueError, match="within a step"):
        simulation.load_state_dict(simulation.state_dict())
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.deepcopy(simulation)


def test_parameters_do_not_change_within_a_step() -> None:
    model = make_model()
    simulation = Simulation(model, workers=2, lr=0.01)
    run(simulation, range(1))
    with simulation.worker(0):
        pass
    model.p1.requires_grad_(False)
    with simulation.worker(1):
        pass
    with pytest.raises(ValueError, match="frozen or unfrozen after the first worker: do it between steps"):
        simulation.step()


@pytest.mark.parametrize("rank", [2, -1, True, "0"])
def test_there_are_no_other_workers(rank: Any) -> None:
    simulation = Simulation(copy.deepcopy(NORMALISED), workers=2)
    asked: list[Any] = [simulation.state_dict, simulation.buffers, simulation.stats_of, simulation.act]
    asked += [lambda rank: simulation.load_buffers(simulation.buffers(0), rank)]
    asked += [lambda rank: simulation.load_state_dict(simulation.state_dict(), rank)]
    for ask in asked:
        with pytest.raises(ValueError, match=r"worker .* does not exist: there are workers 0 to 1"):
            ask(rank)


def test_buffers_that_are_not_the_models_are_refused_whole() -> None:
    model = copy.deepcopy(NORMALISED)
    simulation = Simulation(model, workers=2)
    before = simulation.buffers(1)
    name = next(iter(before))
    for values, message in (
        ({}, "is not given"),
        ({**before, "other": torch.ones(1)}, "'other' is none of the model's"),
        ({each: torch.ones(77) for each in before}, r"has shape \[77\] and needs"),
        ({each: torch.ones(77) if each != name else value + 1 for each, value in before.items()}, "has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            simulation.load_buffers(values, 1)
        assert all(map(same, before.values(), simulation.buffers(1).values()))
    with simulation.worker(1):
        with pytest.raises(ValueError, match=r"synchronize_buffers\(\) came while worker 1 is computing"):
            simulation.synchronize_buffers()
        with pytest.raises(ValueError, match=r"load_buffers\(\) came while worker 1 is computing"):
            simulation.load_buffers(before, 1)
    model.register_buffer("late", torch.zeros(1))
    with pytest.raises(ValueError, match="buffers or their shapes changed after the simulation was made"):
        run(simulation, range(1))


def test_an_error_inside_leaves_the_worker_as_it_was() -> None:
    model = copy.deepcopy(NORMALISED)
    simulation = Simulation(model, workers=2, lr=0.01)
    with simulation.worker(0):
        model.loss(0, 0).backward()
    before = simulation.buffers(1)
    with pytest.raises(RuntimeError, match="lost"), simulation.worker(1):
        model.loss(1, 0).backward()
        raise RuntimeError("lost")
    assert all(map(same, before.values(), simulation.buffers(1).values()))
    assert all(param.grad is None for param in model.parameters())
    with simulation.worker(1):
        model.loss(1, 0).backward()
    simulation.step()
    assert simulation.stats.steps == 1
