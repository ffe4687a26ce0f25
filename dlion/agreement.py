"""Do all workers train the same thing? Fingerprints to compare cheaply, reports to say what differs.

Reports and checksums come in the order of the voting group; `ranks` beside them are what sentences call those workers.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from dlion.errors import AgreementError, ranks_text
from dlion.header import VERSION, Status, majority_value
from dlion.layout import local, named
from dlion.quoting import shortened
from dlion.sharding import is_sharded, offset_of

Report = dict[str, Any]
SHOWN = 200  # letters of what another worker says
FACTS = 6  # of each parameter: see `trainable_facts`


def trainable_facts(param_groups: list[dict[str, Any]]) -> list[list[Any]]:
    """What the layout follows from: (group, position, name, shape, dtype, begin of its shard) of each trainable one."""
    return [
        [
            *(group, position, name, list(local(param).shape), str(param.dtype).removeprefix("torch.")),
            list(offset_of(param)) if is_sharded(param) else None,
        ]
        for group, position, name, param in named(param_groups)
        if param.requires_grad
    ]


def layout_fingerprint(param_groups: list[dict[str, Any]], options: Mapping[str, Any]) -> int:
    """63 bits over order, names, shapes and dtypes of the trainable parameters, their groups, and the options."""
    facts = json.dumps([trainable_facts(param_groups), len(param_groups), dict(options)], sort_keys=True)
    return int.from_bytes(hashlib.sha256(facts.encode()).digest()[:8], "little") >> 1


def hyper_parameters(param_groups: list[dict[str, Any]], keys: Iterable[str]) -> list[dict[str, Any]]:
    """The values of `keys` in each group, as JSON can say them; tensors as numbers."""
    return [{key: _plain(group[key]) for key in sorted(keys)} for group in param_groups]


def with_those(groups: list[dict[str, Any]], values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with these values of theirs; groups that have been added since keep their own."""
    return [group | (values[k] if k < len(values) else {}) for k, group in enumerate(groups)]


def hyper_fingerprint(hyper: list[dict[str, Any]]) -> int:
    """32 bits over the hyper-parameters of all groups."""
    return zlib.crc32(repr([_plain(group) for group in hyper]).encode())


def first_not_finite(param_groups: list[dict[str, Any]]) -> str | None:
    """Name of the first parameter whose gradient holds an infinity or NaN."""
    for _, _, name, param in named(param_groups):
        if param.grad is not None and not bool(local(param.grad).isfinite().all()):
            return name
    return None


def explain_layouts(reports: list[Report], ranks: Sequence[int]) -> str | None:
    """One sentence naming the ranks whose layout or options are not the common one, and the first difference."""
    return _explain(
        reports,
        ranks,
        key=lambda report: json.dumps([report["parameters"], report["options"]], sort_keys=True),
        differ=_layout_difference,
        begin="the workers do not train the same parameters with the same options",
        advice="give every worker the same trainable parameters, in the same order, and the same options",
    )


def explain_layout_change(
    reports: list[Report], ranks: Sequence[int], t: int, overlap: bool, offender: int
) -> str | None:
    """One sentence naming the ranks that announced a new layout while others did not; None where all did."""
    changed = [rank for rank, said in zip(ranks, reports, strict=True) if said["status"] == Status.LAYOUT_CHANGED]
    if len(changed) == len(reports):
        return None
    what = explain_layouts(reports, ranks) or (
        "the others' changed after their ballots had left: with overlap=True change it before backward"
        if overlap
        else "its parameters were replaced by others"
    )
    whose = ranks_text(changed) if changed else _named(offender, ranks)
    return f"the layout changed on {whose} alone after t={t} steps: {what}"


def explain_hyper_parameters(reports: list[Report], ranks: Sequence[int], offender: int) -> str:
    """One sentence naming the ranks whose hyper-parameters, step count or version are not the common ones.

    Those of a worker that has finished are not compared.

    Args:
        offender: the first worker whose row differs, for rows that are not what their workers say; or NOBODY.
    """
    said = _explain(
        _with_common_hyper_parameters(reports),
        ranks,
        key=lambda report: json.dumps([report["t"], report["hyper"], report.get("version")], sort_keys=True),
        differ=_hyper_difference,
        begin="the workers' hyper-parameters or step counts differ",
        advice="give all workers the same hyper-parameters and schedule, and load all of them from the same checkpoint",
    )
    return said or (
        f"the header of a row of {_named(offender, ranks)} has another version, bucket, t or hyper-parameters than "
        "the others', although the workers themselves agree: use the same version of dlion everywhere, and look for a "
        "faulty network or memory there"
    )


def _with_common_hyper_parameters(reports: list[Report]) -> list[Report]:
    """The reports, and in those of workers that have finished what the others have."""
    compared = [report["hyper"] for report in reports if report["status"] != Status.FINISHED]
    texts = [json.dumps(hyper, sort_keys=True) for hyper in compared]
    common = compared[texts.index(majority_value(texts))] if compared else None
    return [report | {"hyper": common} if report["status"] == Status.FINISHED else report for report in reports]


def explain_not_finite(found: Sequence[str | None], ranks: Sequence[int], t: int) -> str:
    """One sentence naming the parameters, one of each rank where there is one, whose gradients are not finite."""
    where = [f"{_shown(name)} on rank {rank}" for rank, name in zip(ranks, found, strict=True) if name]
    return (
        f"the gradient is not finite in {', '.join(where)} at step t={t} and nonfinite='raise'; no parameter was "
        "written: lower the learning rate, clip, or use nonfinite='abstain'"
    )


def explain_parameters(checksums: Sequence[int], ranks: Sequence[int]) -> str:
    """One sentence naming the ranks whose parameters are not the common ones."""
    different, common = _apart(checksums, ranks)
    return (
        f"parameters differ before the first step: those of {ranks_text(different)} are not those of rank "
        f"{common}: wrap the model in DDP or call dlion.local_gradients(model), after weights "
        "are loaded and before the optimizer is made"
    )


def explain_state(method: str, checksums: Sequence[int], ranks: Sequence[int]) -> str:
    """One sentence naming the ranks whose optimizer state is not the common one."""
    different, common = _apart(checksums, ranks)
    return (
        f"method={method!r} needs equal optimizer state on all workers, and that of {ranks_text(different)} is not "
        f"that of rank {common}: load the same state on every worker, and none that a voting method saved"
    )


def _apart(values: Sequence[int], ranks: Sequence[int]) -> tuple[list[int], int]:
    """The ranks whose value is not the common one, and the first rank that has that."""
    common = majority_value(values)
    different = [rank for rank, value in zip(ranks, values, strict=True) if value != common]
    return different, ranks[values.index(common)]


def report(
    param_groups: list[dict[str, Any]], options: Mapping[str, Any], hyper: list[dict[str, Any]], status: int
) -> Report:
    """What a worker says of itself when something differs: JSON, sent only then. `hyper`: as its ballots announced."""
    return {
        "status": status,
        "version": VERSION,
        "t": int(param_groups[0]["t"]),
        "hyper": [_plain(group) for group in hyper],
        "options": dict(options),
        "parameters": trainable_facts(param_groups),
        "frozen": [name for _, _, name, param in named(param_groups) if not param.requires_grad],
        "not_finite": first_not_finite(param_groups),
    }


def checked_reports(told: Sequence[Any], ranks: Sequence[int]) -> list[Report]:
    """What every worker said of itself, after looking whether it can be read.

    Raises:
        AgreementError: what one of them sent is no report.
    """
    for rank, one in zip(ranks, told, strict=True):
        if not _is_report(one):
            raise AgreementError(
                f"rank {rank} sent a report of itself that cannot be read: use the same version of dlion everywhere, "
                "and look at what runs on that rank"
            )
    return list(told)


def _is_report(told: Any) -> bool:
    kinds = {"status": int, "t": int, "hyper": list, "options": dict, "parameters": list, "frozen": list}
    return (
        isinstance(told, dict)
        and all(isinstance(told.get(key), kind) for key, kind in kinds.items())
        and all(isinstance(group, dict) for group in told["hyper"])
        and all(isinstance(fact, list) and len(fact) == FACTS for fact in told["parameters"])
        and isinstance(told.get("not_finite", 0), str | None)
    )


def _explain(
    reports: list[Report],
    ranks: Sequence[int],
    key: Callable[[Report], str],
    differ: Callable[[Report, Report], str],
    begin: str,
    advice: str,
) -> str | None:
    keys = [key(report) for report in reports]
    common = keys.index(majority_value(keys))
    found = [
        f"on rank {rank} {_shown(differ(report, reports[common]))} (compared with rank {ranks[common]})"
        for rank, report, own in zip(ranks, reports, keys, strict=True)
        if own != keys[common]
    ]
    if not found:
        return None
    shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more ranks" if len(found) > 4 else "")
    return f"{begin}: {shown}: {advice}"


def _named(offender: int, ranks: Sequence[int]) -> str:
    """The worker that a verdict's header accuses; there stands whatever its owner wrote."""
    return f"rank {ranks[offender]}" if offender < len(ranks) else "some worker"


def _shown(text: str) -> str:
    """What another worker said, fit for a message."""
    return shortened(text, SHOWN)


def _layout_difference(theirs: Report, common: Report) -> str:
    for name in {**common["options"], **theirs["options"]}:
        own, value = theirs["options"].get(name), common["options"].get(name)
        if own != value:
            return f"{name}={own!r} instead of {value!r}"
    mine, wanted = theirs["parameters"], common["parameters"]
    if not mine or not wanted:
        return f"there are {len(mine)} trainable parameters instead of {len(wanted)}"
    for a, b in zip(mine, wanted, strict=False):
        if a != b:
            return _parameter_difference(a, b, theirs, common)
    if len(mine) < len(wanted):
        return _missing(wanted[len(mine)], theirs)
    if len(mine) == len(wanted):
        return "something else differs"
    return f"there is one more trainable parameter, {_text(mine[len(wanted)])}"


def _parameter_difference(mine: list[Any], wanted: list[Any], theirs: Report, common: Report) -> str:
    if wanted not in theirs["parameters"] and mine in common["parameters"]:
        return _missing(wanted, theirs)
    if mine[2] in common["frozen"]:
        return f"{_text(mine)} is trainable but should be frozen"
    if mine[:-1] == wanted[:-1]:
        return f"{_text(mine)} is the shard that begins at {mine[-1]} instead of {wanted[-1]}"
    return f"{_text(mine)} stands where {_text(wanted)} should"


def _missing(wanted: list[Any], theirs: Report) -> str:
    return f"{_text(wanted)} is {'frozen' if wanted[2] in theirs['frozen'] else 'missing'}"


def _text(fact: list[Any]) -> str:
    _, _, name, shape, dtype, _ = fact
    return f"{name} {shape} {dtype}"


def _hyper_difference(theirs: Report, common: Report) -> str:
    if theirs.get("version") != common.get("version"):
        return f"rows have version {theirs.get('version')} instead of {common.get('version')}"
    if theirs["t"] != common["t"]:
        return f"t={theirs['t']} steps were applied instead of {common['t']}"
    if len(theirs["hyper"]) != len(common["hyper"]):
        return f"there are {len(theirs['hyper'])} parameter groups instead of {len(common['hyper'])}"
    for index, (mine, wanted) in enumerate(zip(theirs["hyper"], common["hyper"], strict=True)):
        for key, value in wanted.items():
            if mine.get(key) != value:
                return f"group {index} has {key}={mine.get(key)} instead of {value}"
    return "something else differs"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, SupportsFloat) and not isinstance(value, (bool, int)):
        return float(value)  # a numpy number says itself in other words than the same float
    return value
