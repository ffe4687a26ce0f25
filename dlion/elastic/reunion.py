"""What the workers of a new round do first: find out where each stands, and bring everybody to the same state.

Everything travels through the exchange's own channel as bytes and JSON; nothing of a peer's is unpickled.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlion.channel import Channel
from dlion.elastic.quorum import workers_text
from dlion.elastic.standing import Standing, behind, donor, resolves
from dlion.elastic.tolerance import ElasticExchange
from dlion.errors import AgreementError, ExchangeError
from dlion.header import majority_value
from dlion.layout import local, overwrite
from dlion.methods import METHODS, Choices
from dlion.options import check_parameters
from dlion.pipeline import Steps

if TYPE_CHECKING:
    from dlion.elastic import Elastic


def exchange_among(optimizer: "Elastic") -> tuple[ElasticExchange, Steps]:
    """The exchange among the members of a new round, and how steps are taken in it."""
    for group in optimizer.param_groups:
        check_parameters(group)
    o, rounds, rule = optimizer.options, optimizer.rounds, optimizer.rule
    # one worker that is left speaks as it did before: its ballots may be older than its loneliness
    size = max(2, len(rounds.members))
    choices = Choices(optimizer.chosen_kernels()[1], size, o.ties, o.zeros, o.rounding)
    steps = METHODS[optimizer.method].steps(rule, choices)
    told = (optimizer.param_groups, optimizer.keys, optimizer.state, optimizer.stats, optimizer.phases)
    exchange = ElasticExchange(rounds.group, None, o, steps.wire, *told, rule.shared_state)
    rule.allocate(exchange.replica)
    return exchange, steps


def reunite(optimizer: "Elastic") -> None:
    """Bring this worker to the state that its round goes on from.

    First come the verdicts of a step whose commit this worker missed: it applies them where that was decided. Then
    who is still behind receives the state of the others, and does not vote in this step: its gradient is not of
    these parameters.

    Raises:
        AgreementError: this worker's layout or options are not the majority's.
        ExchangeError: a worker was lost, or leaves; every state is one that some round committed.
    """
    rounds = optimizer.rounds
    standings = rounds.gather(optimizer.standing())
    if resolves(standings[rounds.rank], standings):
        optimizer.apply_held()
    standings = rounds.gather(optimizer.standing(checked=True))
    _check_layouts(standings, optimizer)
    late = behind(standings)
    if rounds.channel is not None:
        if late:
            _hand_over(optimizer, rounds.channel, donor(standings), rounds.rank in late)
        newcomers = [rank for rank, standing in enumerate(standings) if not standing.seasoned]
        if 0 < len(newcomers) < len(standings):
            mean_momentum(optimizer, rounds.channel, newcomers)
        if late:
            whole = rounds.gather(optimizer.standing(checked=True))
            if behind(whole):
                names = workers_text([rounds.numbers[rank] for rank in behind(whole)])
                raise ExchangeError(f"the parameters that {names} received are not those that were sent")
    optimizer.seasoned = True


def mean_momentum(optimizer: "Elastic", channel: Channel, newcomers: list[int]) -> None:
    """Where a newcomer's momentum starts: at the mean of the others'.

    It is their best guess of the gradient, as after a resume at another number of workers. With zeros a newcomer
    would vote by single batches for 1/(1 - beta2) steps, and a copy of one worker's would give that one two votes.
    State that all workers share has come with the parameters.
    """
    replica = optimizer.exchange.replica
    if optimizer.rule.shared_state(replica):
        return
    others = channel.size - len(newcomers)
    new = channel.rank in newcomers
    for param in replica.params:
        for name in optimizer.rule.kept:
            mine: Tensor | None = replica.state[param].get(name)
            if mine is None:
                continue
            wide = torch.zeros(mine.shape, dtype=torch.float64 if mine.dtype == torch.float64 else torch.float32)
            if not new:
                wide.copy_(local(mine))
            total = channel.sum_(wide.to(channel.device)).wait()
            if new:
                local(mine).copy_(total / others)


def _check_layouts(standings: list[Standing], optimizer: "Elastic") -> None:
    layouts = [standing.layout for standing in standings]
    usual = majority_value(layouts)
    rounds = optimizer.rounds
    strange = [rounds.numbers[rank] for rank, layout in enumerate(layouts) if layout != usual]
    if not strange:
        return
    if layouts[rounds.rank] != usual:
        rounds.leave()
        raise AgreementError(
            f"worker {rounds.numbers[rounds.rank]} cannot join: it does not train the same parameters with the same "
            "options as most others, who go on without it: give every worker the same trainable parameters, in the "
            "same order, and the same options"
        )
    raise ExchangeError(f"{workers_text(strange)} cannot join with other parameters or options, and leaves")


def _hand_over(optimizer: "Elastic", channel: Channel, source: int, takes: bool) -> None:
    """Worker `source` sends everybody its state; who `takes` it makes it its own, all of it or nothing."""
    replica = optimizer.exchange.replica
    told: Any = channel.gather_json(_told(optimizer) if channel.rank == source else None)[source]
    state = [local(param) for param in replica.params] + optimizer.rule.shared_state(replica) + _beside(optimizer)
    sent = state if channel.rank == source else [torch.empty_like(each) for each in state]
    channel.broadcast_([each.detach() for each in sent], source)
    if takes:
        for mine, received in zip(state, sent, strict=True):
            overwrite(mine, received)
        optimizer.take_over(told)


def _told(optimizer: "Elastic") -> dict[str, Any]:
    """What goes with the tensors of a state, JSON."""
    return {
        "t": int(optimizer.param_groups[0]["t"]),
        "position": optimizer.position,
        "round": optimizer.round,
        "hyper": optimizer.hyper_parameters(),
        "luggage": optimizer.luggage,
    }


def _beside(optimizer: "Elastic") -> list[Tensor]:
    """What a newcomer receives beside trained parameters: frozen ones and buffers of the module."""
    if optimizer.module is None:
        return []
    trained = {id(param) for param in optimizer.exchange.replica.params}
    both = (*optimizer.module.parameters(), *optimizer.module.buffers())
    return [local(tensor) for tensor in both if id(tensor) not in trained]


def set_hyper_parameters(param_groups: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
    """Take what `agreement.hyper_parameters` said of another worker's groups."""
    for group, hyper in zip(param_groups, told, strict=True):
        for key, value in hyper.items():
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
