"""gradient -> message, verdict -> parameters: what is learned, and nothing of how it travels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from dlion.codecs import Levels, Moment
from dlion.layout import WORD, Bucket, Piece, local
from dlion.replica import Replica
from dlion.sharding import in_shards, is_sharded
from dlion.survey import Questions

ROUNDING_SEED = 0  # of stochastic rounding; one for all runs, because it must be one for all workers
NOBODYS_RANK = 0  # of the rounding of momenta that must be equal on all workers


class Rule(Protocol):
    """What a worker says about its gradient, and what it does with the answer.

    What is a worker's own (momenta, residuals) moves in `survey` and `message`; what all workers share (parameters,
    state of `shared_state`) moves in `apply` and `finish`.

    Attributes:
        kept: names of the state that keeps its dtype when it is loaded, where torch would cast it to the parameter's.
        thin: those of them that do not have the parameter's shape.
    """

    kept: tuple[str, ...] = ("exp_avg",)
    thin: tuple[str, ...] = ()

    def defaults(self) -> dict[str, Any]:
        """Keys that each parameter group needs, with their defaults."""

    def allocate(self, replica: Replica) -> None:
        """Give every trainable parameter its state."""

    def momentum_dtype(self, param: Tensor) -> torch.dtype:
        """Of the parameter's `kept` state, whatever dtype a loaded one has."""
        return torch.float64 if param.dtype == torch.float64 else torch.float32

    def shared_state(self, replica: Replica) -> list[Tensor]:
        """The state that must be equal on all workers, in an order that all share; zeros may be missing."""
        return []

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        """What must be known of all workers before the step's first ballot; most rules ask nothing.

        What the ballots of this step need of it is kept in `replica.noted`.
        """
        yield from ()

    def message(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Any, bool]:
        """What the encoder takes, most often f[bucket.size] with 0 in padding; and whether the gradients were finite.

        May move local state.
        """

    def apply(self, replica: Replica, bucket: Bucket, verdict: Any, moment: Moment) -> None:
        """Do with this worker's copy of the parameters what all workers do."""

    def finish(self, replica: Replica) -> None:
        """Called once when every bucket of the step has been applied."""
        return


@dataclass(frozen=True)
class Lion(Rule):
    """Lion's message from the local gradient and momentum (arXiv 2404.00438, Algorithm 1).

    Args:
        rounding: of bf16 and fp16 parameters: "stochastic", equal on all workers and complemented in the next step, so
            that steps below the dtype's resolution are not lost; or "nearest".
        momentum: dtype of all momenta; None: float32, and float64 for float64 parameters.
    """

    kernels: ModuleType
    rounding: str
    momentum: torch.dtype | None

    def defaults(self) -> dict[str, Any]:
        return {"lr": 1e-4, "betas": (0.9, 0.99)}

    def betas(self, hyper: dict[str, Any]) -> tuple[float, float]:
        """Of the message and of the momentum, among a group's hyper-parameters."""
        first, second = hyper["betas"]
        return first, second

    def allocate(self, replica: Replica) -> None:
        replica.allocate_momentum(self.momentum_dtype)

    def momentum_dtype(self, param: Tensor) -> torch.dtype:
        return self.momentum or super().momentum_dtype(param)

    def message(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        def say(piece: Piece) -> tuple[Tensor, Tensor]:
            grad, momentum = signed_gradient(replica, piece), replica.momentum(piece)
            where = (bucket.first_word + piece.offset // WORD, moment.t, moment.rank)
            said: tuple[Tensor, Tensor] = self.kernels.lion_message(
                grad, momentum, *self.betas(replica.hyper(piece.slot)), *where
            )
            return said

        return gathered(bucket, say)

    def apply(self, replica: Replica, bucket: Bucket, verdict: Levels, moment: Moment) -> None:
        for piece in bucket.pieces:
            first = piece.offset // WORD
            planes = verdict.planes[:, first : first + -(-(piece.stop - piece.start) // WORD)]
            levels = Levels(planes, verdict.numerators, verdict.denominator)
            self.step(replica, piece, levels, bucket.first_word + first, moment)

    def step(self, replica: Replica, piece: Piece, verdict: Levels, first_word: int, moment: Moment) -> None:
        """Decay and step of one piece: `p = p*(1 - lr*wd) - lr*u`."""
        hyper = replica.hyper(piece.slot)
        param = replica.parameter(piece)
        table, decay = verdict.table(hyper["lr"]), 1 - hyper["lr"] * hyper["weight_decay"]
        where = (first_word, moment.t, ROUNDING_SEED)
        self.kernels.apply([param], verdict.planes, [0], [0], table, [decay], self.rounding, *where)
        replica.write(piece, param)


@dataclass(frozen=True)
class Global(Rule):
    """Exchange gradients; every worker then takes the same step of `rule` with their mean, as if it were alone."""

    rule: Lion

    def defaults(self) -> dict[str, Any]:
        return self.rule.defaults()

    def allocate(self, replica: Replica) -> None:
        self.rule.allocate(replica)

    def momentum_dtype(self, param: Tensor) -> torch.dtype:
        return self.rule.momentum_dtype(param)

    def shared_state(self, replica: Replica) -> list[Tensor]:
        return state_tensors(replica)

    def message(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        return gathered(bucket, lambda piece: finite_or_zero(signed_gradient(replica, piece)))

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, moment: Moment) -> None:
        kernels = self.rule.kernels
        for piece in bucket.pieces:
            momentum = replica.momentum(piece)
            mean = verdict[piece.offset : piece.offset + momentum.numel()].to(momentum.device)
            # full-precision layouts have no words: numbers that grow with the element serve a rounding's hash as well
            first = bucket.first + piece.offset
            betas = replica.hyper(piece.slot)["betas"]
            message, _ = kernels.lion_message(mean, momentum, *betas, first, moment.t, NOBODYS_RANK)
            planes = kernels.pack_ternary(torch.nn.functional.pad(message, (0, -message.numel() % WORD)))
            self.rule.step(replica, piece, Levels(planes, (0, -1, 0, 1), 1), first, moment)


@dataclass
class Gradient(Rule):
    """Exchange gradients; a torch optimizer does the stepping with their mean.

    A tensor of which a bucket had no voter does not move in that step.

    Args:
        optimizer: for instance torch.optim.AdamW.
    """

    optimizer: Callable[..., torch.optim.Optimizer]
    _means: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _seen: dict[int, int] = field(default_factory=dict, repr=False)

    def defaults(self) -> dict[str, Any]:
        return dict(self.optimizer([torch.zeros(1, device="cpu")]).defaults)

    def allocate(self, replica: Replica) -> None:
        inner = self.optimizer([torch.zeros(1, device="cpu")])
        for slot, param in enumerate(replica.params):
            if replica.state.get(param):
                continue
            # a step of length 0 makes torch's own state; on a stand-in, since in float16 even that one gives 0/0
            standin = torch.zeros_like(param, requires_grad=True)
            standin.grad = torch.zeros_like(param)
            inner.param_groups = [dict(replica.group(slot), lr=0.0, params=[standin])]
            inner.step()
            replica.state[param] = inner.state.pop(standin)
            if "step" in replica.state[param]:
                replica.state[param]["step"].zero_()

    def momentum_dtype(self, param: Tensor) -> torch.dtype:
        return param.dtype

    def shared_state(self, replica: Replica) -> list[Tensor]:
        return state_tensors(replica)

    def message(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        return gathered(bucket, lambda piece: finite_or_zero(replica.gradient(piece)))

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, moment: Moment) -> None:
        for piece in bucket.pieces:
            param = local(replica.params[piece.slot])
            if piece.slot not in self._means:
                self._means[piece.slot] = param.new_zeros(param.numel(), requires_grad=False)
                self._seen[piece.slot] = 0
            length = piece.stop - piece.start
            self._means[piece.slot][piece.start : piece.stop] = verdict[piece.offset : piece.offset + length]
            self._seen[piece.slot] += length

    def finish(self, replica: Replica) -> None:
        means = {
            param: _mean_of(param, self._means[slot])
            for slot, param in enumerate(replica.params)
            if self._seen.get(slot) == local(param).numel()
        }
        self._means.clear()
        self._seen.clear()
        self._step(replica, means)

    def _step(self, replica: Replica, grads: dict[Tensor, Tensor]) -> None:
        """Step with `grads` in the place of the local gradients, which are put back."""
        local_ones = [param.grad for param in replica.params]
        inner = self.optimizer([torch.zeros(1, device="cpu")])
        # a frozen parameter may still hold a gradient of this worker's own
        trained = [[param for param in group["params"] if param.requires_grad] for group in replica.param_groups]
        inner.param_groups = [group | {"params": own} for group, own in zip(replica.param_groups, trained, strict=True)]
        inner.state = replica.state
        try:
            for param in replica.params:
                param.grad = grads.get(param)
            inner.step()
        finally:
            for param, grad in zip(replica.params, local_ones, strict=True):
                param.grad = grad


def _mean_of(param: Tensor, mean: Tensor) -> Tensor:
    """A flat mean in the form of the parameter's gradient, which of a sharded parameter is sharded too."""
    shaped = mean.view(local(param).shape)
    return in_shards(shaped, param) if is_sharded(param) else shaped


def signed_gradient(replica: Replica, piece: Piece) -> Tensor:
    """f[n]: the local gradient, negated where its group maximizes."""
    grad = replica.gradient(piece)
    return -grad if replica.hyper(piece.slot)["maximize"] else grad


def state_tensors(replica: Replica, without: tuple[str, ...] = ()) -> list[Tensor]:
    """All tensors of the state but those of some names: one for each parameter and name, empty where there is none."""
    kept = [replica.state.get(param, {}) for param in replica.params]
    names = sorted({name for each in kept for name in each}.difference(without))
    found = [each.get(name) for each in kept for name in names]
    return [local(value) if isinstance(value, Tensor) else torch.zeros(0, device="cpu") for value in found]


def finite_or_zero(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient with 0 where it is not finite, and whether all of it was."""
    finite = grad.isfinite()
    return torch.where(finite, grad, 0.0), finite.all()


def gathered(bucket: Bucket, say: Callable[[Piece], tuple[Tensor, Tensor]]) -> tuple[Tensor, bool]:
    """One flat message from what is said of every piece, on the device of the first; and whether all was finite."""
    flat: Tensor | None = None
    finite: Tensor | None = None
    for piece in bucket.pieces:
        said, fine = say(piece)
        if flat is None or finite is None:
            flat, finite = torch.zeros(bucket.size, dtype=bucket.dtype, device=said.device), fine
        else:
            finite = finite & fine.to(finite.device)
        flat[piece.offset : piece.offset + said.numel()] = said
    if flat is None or finite is None:
        return torch.zeros(bucket.size, dtype=bucket.dtype, device="cpu"), True
    return flat, bool(finite)
