"""Workers that run out of data before the others: torch's `Join` protocol (torch.distributed.algorithms.join).

    with Join([model, optimizer]):            # every worker, the module first if it is a DistributedDataParallel
        for inputs in uneven:
            ...
            optimizer.step()

A worker that has finished takes part in every step of the others: it counts ballots, abstains, and its momentum rests.
It does not apply verdicts, because its learning rate may have stopped where its data did. In the end it receives
parameters, whatever state all workers share, t and hyper-parameters from one that finished last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from dlion.agreement import layout_fingerprint
from dlion.channel import Channel
from dlion.codecs import Moment
from dlion.errors import AgreementError
from dlion.layout import Bucket, local
from dlion.membership import Membership
from dlion.pipeline import Steps, Wire
from dlion.replica import Replica
from dlion.survey import Questions

if TYPE_CHECKING:
    from dlion.optim import Distributed

NOT_SENT = ("params", "param_names")  # of a parameter group

Shared = list[tuple[int, str, Tensor]]

INSTEAD = {
    "Elastic": "a worker that has no more data calls close(), and the others go on without it",
    "Simulation": 'a worker that has no more data gets dlion.simulate.Fault("absent", ...) for the steps that are left',
}
"""Of optimizers whose workers are no processes of one group that `Join` could wait for, by class."""


def announce(optimizer: "Distributed") -> None:
    """Tell workers that have finished, if `Join` is in use, that this one takes a step.

    Raises:
        ValueError: what was asked of `Join` cannot be done with `overlap=True`.
        RuntimeError: somebody has finished, and `throw_on_early_termination=True`.
    """
    if optimizer.options.overlap and optimizer._join_config.throw_on_early_termination:
        raise ValueError(
            "throw_on_early_termination=True of Join ends a step in which ballots have left during backward already, "
            "with overlap=True: use overlap=False, or leave throw_on_early_termination out"
        )
    Join.notify_join_context(optimizer)


@dataclass(frozen=True)
class Onlooker:
    """The steps of a worker that looks on: it hears what is asked and counts, and applies nothing."""

    steps: Steps

    @property
    def wire(self) -> Wire:
        return self.steps.wire

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        return self.steps.survey(replica, moment)

    def ballot(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, Any]:
        return self.steps.ballot(replica, bucket, moment)

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, voters: Any, moment: Moment) -> None:
        return

    def finish(self, replica: Replica) -> None:
        return


class Shadow(JoinHook):
    """What `Join` calls for one optimizer of a worker that has finished.

    Args:
        optimizer: whose steps are followed.
        schedulers: learning rate schedulers; those of this optimizer receive the state of a worker that finished last.

    Raises:
        ValueError: `schedulers` is no list of schedulers.
    """

    def __init__(self, optimizer: "Distributed", schedulers: Any = ()) -> None:
        listed = isinstance(schedulers, (list, tuple))
        if not listed or not all(hasattr(scheduler, "load_state_dict") for scheduler in schedulers):
            raise ValueError(
                f"schedulers={schedulers!r} of Join must be a list of learning rate schedulers, such as [scheduler]"
            )
        self._optimizer = optimizer
        self._schedulers = [one for one in schedulers if getattr(one, "optimizer", None) is optimizer]

    def main_hook(self) -> None:
        """One step of the workers that have data still."""
        self._optimizer.look_on()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have finished: who finished earlier receives what all share."""
        self._optimizer.check()  # of steps that nobody has heard of, before parameters change hands
        channel = Channel(self._optimizer.join_process_group)
        row = torch.tensor([int(is_last_joiner)], device=channel.device)
        last = channel.all_gather(row).wait().view(-1).tolist()
        if not all(last):
            receive(self._optimizer, self._schedulers, channel, source=last.index(1))


class Follower(Joinable):
    """The part of an optimizer that torch's `Join` sees."""

    membership: Membership

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What `Join` calls when this worker has finished; the optimizer's own among `schedulers=[...]` follow it.

        Raises:
            ValueError: this optimizer is none for `Join`.
        """
        for kind in type(self).__mro__:
            if kind.__name__ in INSTEAD:
                raise ValueError(
                    "torch's Join is for dlion.Distributed and dlion.DistributedLion, one process for each worker, and "
                    f"{kind.__name__} was given: leave it out; {INSTEAD[kind.__name__]}"
                )
        return Shadow(cast("Distributed", self), kwargs.get("schedulers", ()))

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The workers that vote."""
        return Channel(self.membership.group(type(self).__name__, before=1)).group

    @property
    def join_device(self) -> torch.device:
        """Where what these workers exchange lies."""
        return Channel(self.join_process_group).device


@torch.no_grad()
def receive(optimizer: "Distributed", schedulers: list[Any], channel: Channel, source: int) -> None:
    """Give every worker the parameters, shared state, hyper-parameters, t and schedule of worker `source`.

    Raises:
        AgreementError: a worker has other parameters or schedulers.
    """
    replica = Replica(optimizer.param_groups, optimizer.state)
    mine = shared_state(optimizer, replica)
    told = {
        "layout": [layout_fingerprint(optimizer.param_groups, {}), len(schedulers)],
        "groups": [plain_items(group, without=NOT_SENT) for group in optimizer.param_groups],
        "schedulers": [plain_items(scheduler.state_dict()) for scheduler in schedulers],
        "shared": [[slot, name, list(value.shape), _dtype_name(value)] for slot, name, value in mine],
    }
    everybody = channel.gather_json(told if channel.rank == source else {"layout": told["layout"]})
    layouts = [theirs["layout"] for theirs in everybody]
    strangers = [rank for rank, theirs in zip(channel.ranks, layouts, strict=True) if theirs != layouts[source]]
    if strangers:
        raise AgreementError(
            f"rank {strangers[0]} has other parameters or schedulers than rank {channel.ranks[source]} at the end of "
            "Join: give every worker the same, in the same order"
        )
    given = everybody[source]
    shared = [_place(replica, slot, name, shape, dtype) for slot, name, shape, dtype in given["shared"]]
    channel.broadcast_([local(param).detach() for param in replica.params] + shared, source)
    for group, values in zip(optimizer.param_groups, given["groups"], strict=True):
        take_items(group, values)
    optimizer._renewal.begin_anew()
    for scheduler, values in zip(schedulers, given["schedulers"], strict=True):
        state = scheduler.state_dict()
        take_items(state, values)
        scheduler.load_state_dict(state)


def shared_state(optimizer: "Distributed", replica: Replica) -> Shared:
    """(slot, name, tensor) of the state that must be equal on all workers."""
    common = {value.data_ptr() for value in optimizer.rule.shared_state(replica) if value.numel()}
    return [
        (slot, name, local(value))
        for slot, param in enumerate(replica.params)
        for name, value in replica.state.get(param, {}).items()
        if isinstance(value, Tensor) and value.numel() and local(value).data_ptr() in common
    ]


def plain_items(values: dict[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """The entries that JSON can say, inner ones as well; a tensor of one element as its number."""
    said: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str) or name in without:
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            said[name] = value.item()
        elif isinstance(value, dict):
            said[name] = plain_items(value)
        elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
            said[name] = [plain_items(inner) for inner in value]
        elif _is_plain(value):
            said[name] = value
    return said


def take_items(values: dict[str, Any], given: dict[str, Any]) -> None:
    """Put what `plain_items` said into `values`, each in the form that is there."""
    for name, value in given.items():
        mine = values.get(name)
        if isinstance(mine, Tensor):
            mine.fill_(value)
        elif isinstance(mine, dict):
            take_items(mine, value)
        elif isinstance(mine, list) and mine and all(isinstance(inner, dict) for inner in mine):
            for inner, theirs in zip(mine, value, strict=True):
                take_items(inner, theirs)
        else:
            values[name] = tuple(value) if isinstance(mine, tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _place(replica: Replica, slot: int, name: str, shape: list[int], dtype: str) -> Tensor:
    """This worker's own tensor of that name, made where there is none."""
    param = replica.params[slot]
    state = replica.state[param]
    if name not in state or list(local(state[name]).shape) != shape:
        state[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=local(param).device)
    return local(state[name])
