"""Models that torch compiled, and compiled functions that call `step()`: Dynamo leaves the exchange alone."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import launch, meet
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from dlion import Distributed, DistributedLion, Simulation, local_gradients, synchronize_buffers

Step = Callable[[Tensor], Any]
STEPS = 5


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.BatchNorm1d(70), nn.Linear(70, 3))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def plain(model: nn.Module, optimizer: Distributed, backend: Any) -> Step:
    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def compiled_model(model: nn.Module, optimizer: Distributed, backend: Any) -> Step:
    return plain(torch.compile(model, backend=backend), optimizer, backend)


def compiled_function(model: nn.Module, optimizer: Distributed, backend: Any) -> Step:
    return torch.compile(plain(model, optimizer, backend), backend=backend)


def compiled_step(model: nn.Module, optimizer: Distributed, backend: Any) -> Step:
    stepping = torch.compile(optimizer.step, backend=backend)

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        stepping()

    return step


def compiled_closure(model: nn.Module, optimizer: Distributed, backend: Any) -> Step:
    def step(inputs: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return torch.compile(step, backend=backend)


def trained(how: Callable[..., Step], backend: Any = None, **options: Any) -> Tensor:
    model = small_model()
    optimizer = DistributedLion(model.parameters(), lr=0.01, **options)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)  # which puts a function of its own around `step`
    step = how(model, optimizer, backend)
    for number in range(STEPS):
        step(batch(number))
        scheduler.step()
        if number == 1 and isinstance(backend, Graphs):
            seen = backend.count
    assert not isinstance(backend, Graphs) or backend.count == seen <= 2, "the exchange was traced"
    assert optimizer.param_groups[0]["t"] == optimizer.stats.steps == STEPS
    return flat(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # from within torch.compile, of the loss
@pytest.mark.parametrize("how", [compiled_model, compiled_function, compiled_step, compiled_closure])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_the_model_is_compiled_and_the_exchange_is_not(how: Callable[..., Step], overlap: bool) -> None:
    assert torch.equal(trained(how, Graphs(), overlap=overlap), trained(plain))


@pytest.mark.parametrize("how", [compiled_model, compiled_function])
def test_with_graphs_of_autograd_too(how: Callable[..., Step]) -> None:
    assert torch.allclose(trained(how, "aot_eager"), trained(plain), atol=2 * STEPS * 0.01)  # signs near 0 may differ


def test_a_simulated_step_is_left_alone_too() -> None:
    backend = Graphs()
    ends = []
    for compiled in (False, True):
        model = small_model()
        simulation = Simulation(model, workers=3, lr=0.01)

        def step(simulation: Simulation = simulation) -> None:
            simulation.step()

        stepping = torch.compile(step, backend=backend) if compiled else step
        for number in range(STEPS):
            for rank in range(3):
                with simulation.worker(rank):
                    model(batch(number, rank)).square().mean().backward()
            stepping()
        ends.append(flat(model))
    assert torch.equal(*ends) and backend.count == 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from within torch.compile
def test_another_optimizer_may_be_compiled_beside_it() -> None:
    model = small_model()
    votes = DistributedLion(model[0].parameters(), lr=0.01)
    other = torch.optim.AdamW(model[3].parameters(), lr=0.01)
    backend = Graphs()
    stepping = torch.compile(other.step, backend=backend)
    start = flat(model)
    for number in range(STEPS):
        model.zero_grad()
        model(batch(number)).square().mean().backward()
        votes.step()
        stepping()
    assert backend.count > 0 and votes.stats.steps == STEPS and not torch.equal(start, flat(model))


# ---- DistributedDataParallel inside and outside of what is compiled

WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled outside": lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager"),
    "compiled inside": lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager")),
    "compiled without": lambda model: torch.compile(model, backend="aot_eager"),
}


def wrapped(rank: int, size: int, folder: Path) -> Any:
    meet(folder, "store", rank, size)
    results = {}
    for name, wrap in WRAPPED.items():
        torch.compiler.reset()
        given = wrap(small_model(seed=rank))
        model = local_gradients(given)
        assert model is given
        optimizer = DistributedLion(model.parameters(), lr=0.01)
        step = compiled_function(model, optimizer, "eager") if name == "compiled without" else None
        for number in range(STEPS):
            (step or plain(model, optimizer, None))(batch(number, rank))
        gradient = flat_gradient(model)
        synchronize_buffers(model)
        values = [*model.parameters(), *model.buffers()]
        results[name] = [gradient, [value.flatten().tolist() for value in values]]
    return results


def flat_gradient(model: nn.Module) -> list[float]:
    return [x for param in model.parameters() for x in param.grad.flatten().tolist()]


@pytest.mark.processes
def test_gradients_stay_local_wherever_the_model_was_compiled(tmp_path: Path) -> None:
    first, second = launch(tmp_path, 2, wrapped, seconds=100)
    for name in WRAPPED:
        (gradient, values), (other, others) = first[name], second[name]
        assert gradient != other and values == others, name


def test_a_copy_of_an_optimizer_is_left_alone_too() -> None:
    backend = Graphs()
    model = small_model()
    optimizer = copy.deepcopy(DistributedLion(model.parameters(), lr=0.01))
    stepping = torch.compile(optimizer.step, backend=backend)
    for _ in range(2):
        stepping()
    assert backend.count == 0
