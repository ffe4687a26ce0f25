"""An optimizer as something that is saved, loaded, copied and pickled."""

import copy
from typing import Any

import torch

from dlion.errors import OverlapError
from dlion.loading import momenta_kept
from dlion.membership import Membership
from dlion.methods import METHODS
from dlion.ops import operators
from dlion.options import Options
from dlion.phases import Phases
from dlion.renewal import Renewal
from dlion.rules import Rule
from dlion.stats import Stats


class OwnState(torch.optim.Optimizer):
    """The part of `dlion.Distributed` that keeps one worker's own state; it never communicates."""

    method: str
    options: Options
    asked_kernels: str
    phases: Phases
    membership: Membership
    rule: Rule
    _stats: Stats
    _renewal: Renewal

    @property
    def stats(self) -> Stats:
        """What the exchange cost; to ask for it waits for the steps that are under way."""
        self._renewal.count()
        return self._stats

    def state_dict(self) -> dict[str, Any]:
        """This worker's own state.

        Raises:
            AgreementError, NonFiniteGradientError: a step was refused, and nobody has heard of it: see `check`.
        """
        self._renewal.refuse_trouble()
        state = super().state_dict()
        for group in state["param_groups"]:
            group["t"] = int(group["t"])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this worker's own state; momentum keeps its dtype, whatever the parameter's is.

        Raises:
            ValueError: a momentum has another shape than its parameter. OverlapError: ballots of a step have left.
        """
        if self._renewal.begun is not None:
            raise OverlapError("a state was loaded after ballots had left, with overlap=True: load it before backward")
        with momenta_kept(self, self.rule.kept, self.rule.thin, self.rule.momentum_dtype):
            super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "method" in state:  # an unpickled or copied optimizer; load_state_dict keeps what it had agreed
            self._attach()
        for group in self.param_groups:
            for name, value in {**self.defaults, "t": 0}.items():
                group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        mine = ("method", "options", "asked_kernels", "phases", "membership")
        state = super().__getstate__() | {name: getattr(self, name) for name in mine} | {"_stats": self.stats}
        return state | {"param_groups": [group | {"t": int(group["t"])} for group in self.param_groups]}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.membership = Membership(self.membership.given, self.membership.lost)
        return twin

    def _attach(self) -> None:
        """What is made anew in every process, and never pickled."""
        kernels = operators(self.asked_kernels)
        self.rule = METHODS[self.method].rule(kernels, self.options.rounding, self.options.momentum_dtype)
