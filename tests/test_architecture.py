"""Guards who may use what: the arrows between the files of dlion, read from their source with `ast`.

Every rule is a function from one source file to the faults it finds. The package must have none, and for each
rule a bad snippet shows that it can fail.
"""

import ast
import functools
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from source_reader import Source

ROOT = Path(__file__).resolve().parent.parent

COLLECTIVE_USERS = ("dlion/channel.py", "dlion/voting.py")
APPLICATION = ("dlion/train/", "dlion/cli.py", "dlion/__main__.py")

# Every torch.distributed function that starts so talks to other workers, whatever its suffix (_single, _object, ...).
COLLECTIVES = tuple(
    """all_gather all_reduce all_to_all barrier batch_isend_irecv broadcast gather irecv isend monitored_barrier
    new_group new_subgroups nn reduce recv scatter send split_group""".split()
)
# The same calls as methods of a process group, whatever the variable is called. Names that other objects
# have too (broadcast, barrier, gather) cannot be told apart here.
GROUP_METHODS = frozenset("allgather allgather_coalesced allreduce allreduce_coalesced alltoall alltoall_base".split())

# file -> {private torch name: why there is no public way}. A use must stand in a `try` that says what
# happens without it.
PRIVATE_TORCH: dict[str, dict[str, str]] = {
    "dlion/ops/kept.py": {"torch._foreach_add_": "one launch for a hundred numbers, of a thousand in a table"},
    "dlion/phases.py": {
        "torch.autograd.profiler._is_profiler_enabled": "a range costs 10 microseconds even while nobody profiles"
    },
    "dlion/voting.py": {
        f"torch.distributed.distributed_c10d._world{attribute}": "torch names groups after it, and does not show it"
        for attribute in ("", ".pg_names")
    },
    "tests/test_memory.py": {
        "torch.utils._python_dispatch.TorchDispatchMode": "the only way to see every tensor that a step makes"
    },
    "tests/unread.py": {
        "torch.utils._python_dispatch.TorchDispatchMode": "the only way to see every question to a tensor"
    },
}
# file -> why it is better whole.
LONG_FILES: dict[str, str] = {}

# file -> the extra that it needs beside `train`; only commands that need it import the file.
OPTIONAL: dict[str, str] = {"dlion/train/few_shot/answering.py": "few-shot"}
# Core files that import what an extra brings: inside a function, or as a whole for those who ask for it.
LAZY: dict[str, str] = {
    "dlion/elastic/quorum.py": "torchft",
    "dlion/integrations/accelerate.py": "accelerate",
    "dlion/integrations/lightning.py": "lightning",
    "dlion/integrations/torchtitan.py": "torchtitan",
    "dlion/integrations/transformers.py": "transformers",
}

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50  # without the docstring


Rule = Callable[[Source], Iterator[str]]


def within(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or (place.endswith("/") and path.startswith(place)) for place in places)


def is_under(dotted: str, package: str) -> bool:
    return dotted == package or dotted.startswith(package + ".")


def collectives_stay_in_channel(source: Source) -> Iterator[str]:
    if not source.path.startswith("dlion/") or within(source.path, COLLECTIVE_USERS):
        return
    for node, dotted in source.uses:
        if is_under(dotted, "torch.distributed"):
            part = dotted.split(".")[2:3]
            if part and (part[0].startswith(COLLECTIVES) or part[0] == "*" or "functional_collectives" in part[0]):
                yield source.at(node, f"uses the collective {dotted}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in GROUP_METHODS:
            yield source.at(node, f"uses the collective .{node.attr}")


def foreign_code_stays_in_ops(source: Source) -> Iterator[str]:
    if source.path.startswith("dlion/") and not source.path.startswith("dlion/ops/"):
        for node, _, dotted in source.imports:
            if is_under(dotted, "ctypes") or is_under(dotted, "triton"):
                yield source.at(node, f"imports {dotted} outside ops/")


def nothing_imports_the_application(source: Source) -> Iterator[str]:
    if not source.path.startswith("dlion/") or within(source.path, APPLICATION):
        return
    for node, _, dotted in source.imports:
        if is_under(dotted, "dlion.train") or is_under(dotted, "dlion.cli"):
            yield source.at(node, f"imports {dotted}")
    for node in ast.walk(source.tree):
        # Names handed to import_module.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            if is_under(node.value, "dlion.train") or is_under(node.value, "dlion.cli"):
                yield source.at(node, f"names the module {node.value}")


def torch_is_used_by_its_public_names(source: Source) -> Iterator[str]:
    guarded = {
        id(inner)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Try) and node.handlers
        for statement in node.body
        for inner in ast.walk(statement)
    }
    allowed = PRIVATE_TORCH.get(source.path, {})
    for node, dotted in source.uses:
        private = any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))
        if is_under(dotted, "torch") and private and not (dotted in allowed and id(node) in guarded):
            yield source.at(node, f"uses the private name {dotted}")


def the_core_needs_torch_alone(source: Source) -> Iterator[str]:
    if not source.path.startswith("dlion/") or within(source.path, APPLICATION):
        return
    allowed = sys.stdlib_module_names | {"torch", "dlion"} | ({"triton"} if "/ops/" in source.path else set())
    allowed |= {LAZY[source.path]} if source.path in LAZY else set()
    for node, _, dotted in source.imports:
        if dotted.partition(".")[0] not in allowed:
            yield source.at(node, f"imports {dotted}, which is not torch or the standard library")


def the_application_declares_what_it_needs(source: Source) -> Iterator[str]:
    """What the command imports is in the dependencies or the extra `train` of pyproject.toml."""
    if not within(source.path, APPLICATION):
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {"pillow": "PIL"}
    extras = ["train", *(extra for place, extra in OPTIONAL.items() if source.path == place)]
    declared = [
        name.partition(">")[0].partition("=")[0].strip()
        for name in [*project["dependencies"], *(n for e in extras for n in project["optional-dependencies"][e])]
    ]
    allowed = sys.stdlib_module_names | {"dlion"} | {modules.get(name, name.replace("-", "_")) for name in declared}
    for node, _, dotted in source.imports:
        if dotted.partition(".")[0] not in allowed:
            yield source.at(node, f"imports {dotted}, which pyproject.toml does not declare")


def files_are_short(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > MAX_FILE_LINES and source.path not in LONG_FILES:
        yield f"{source.path}: {lines} lines, at most {MAX_FILE_LINES}"


def functions_are_short(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None:
                lines -= (first.end_lineno or 0) - first.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield source.at(node, f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")


def files_say_what_they_are_for(source: Source) -> Iterator[str]:
    if Path(source.path).stem in {"utils", "util", "helpers", "misc", "common"}:
        yield f"{source.path}: the name says nothing about the content"


RULES: tuple[Rule, ...] = (
    collectives_stay_in_channel,
    foreign_code_stays_in_ops,
    nothing_imports_the_application,
    torch_is_used_by_its_public_names,
    the_core_needs_torch_alone,
    the_application_declares_what_it_needs,
    files_are_short,
    functions_are_short,
    files_say_what_they_are_for,
)


@functools.cache
def sources() -> list[Source]:
    files = [path for part in ("dlion", "bench", "tests") for path in sorted((ROOT / part).rglob("*.py"))]
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in files]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    read = sources()
    assert any(source.path == "dlion/__init__.py" for source in read)
    faults = [fault for source in read for fault in rule(source)]
    assert not faults, "\n".join(faults)


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 50

BAD = [
    (collectives_stay_in_channel, "dlion/optim.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (collectives_stay_in_channel, "dlion/optim.py", "import torch\ntorch.distributed.barrier()"),
    (
        collectives_stay_in_channel,
        "dlion/optim.py",
        "import torch.distributed\ntorch.distributed.broadcast(x, 0)",
    ),
    (collectives_stay_in_channel, "dlion/optim.py", "from torch import distributed as d\nd.new_group()"),
    (collectives_stay_in_channel, "dlion/optim.py", "from torch.distributed import all_gather as g"),
    (collectives_stay_in_channel, "dlion/optim.py", "from torch.distributed import *"),
    (collectives_stay_in_channel, "dlion/topology.py", "import torch.distributed as d\nd.all_gather_single(x, y)"),
    (collectives_stay_in_channel, "dlion/train/loop.py", "import torch.distributed.nn"),
    (collectives_stay_in_channel, "dlion/optim.py", "def f(group, x):\n    group.allreduce([x])"),
    (foreign_code_stays_in_ops, "dlion/codecs.py", "import ctypes"),
    (foreign_code_stays_in_ops, "dlion/codecs.py", "def f():\n    from triton import language"),
    (nothing_imports_the_application, "dlion/optim.py", "from dlion.train import config"),
    (nothing_imports_the_application, "dlion/optim.py", "from .train.config import TrainConfig"),
    (nothing_imports_the_application, "dlion/ops/native.py", "from .. import train"),
    (nothing_imports_the_application, "dlion/optim.py", "import_module('dlion.train.loop')"),
    (torch_is_used_by_its_public_names, "dlion/optim.py", "from torch._C import _something"),
    (torch_is_used_by_its_public_names, "dlion/optim.py", "import torch\ntorch._foreach_add(a, b)"),
    (torch_is_used_by_its_public_names, "dlion/optim.py", "import torch.distributed._tensor as t"),
    (torch_is_used_by_its_public_names, "tests/world.py", "from torch.testing import _internal"),
    (the_core_needs_torch_alone, "dlion/codecs.py", "import numpy as np"),
    (the_core_needs_torch_alone, "dlion/integrations/ddp.py", "def f():\n    from rich import print"),
    (the_application_declares_what_it_needs, "dlion/train/data.py", "import pandas"),
    (files_are_short, "dlion/codecs.py", "x = 1\n" * 301),
    (functions_are_short, "dlion/codecs.py", LONG_FUNCTION),
    (files_say_what_they_are_for, "dlion/utils.py", ""),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_bad_snippet_is_found(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text)))


GOOD = [
    (
        collectives_stay_in_channel,
        "dlion/channel.py",
        "import torch.distributed as dist\ndist.all_reduce(x)",
    ),
    (
        collectives_stay_in_channel,
        "dlion/optim.py",
        "from torch.distributed import ProcessGroup, is_initialized",
    ),
    (collectives_stay_in_channel, "dlion/optim.py", "def f(channel):\n    channel.barrier()"),
    (foreign_code_stays_in_ops, "dlion/ops/native.py", "import ctypes"),
    (nothing_imports_the_application, "dlion/cli.py", "from dlion.train import config"),
    (
        nothing_imports_the_application,
        "dlion/optim.py",
        '"""dlion.train may import this, never the reverse."""',
    ),
    (torch_is_used_by_its_public_names, "dlion/optim.py", "import torch\ntorch.__version__\nx._version"),
    (the_core_needs_torch_alone, "dlion/train/data.py", "import numpy"),
    (
        the_application_declares_what_it_needs,
        "dlion/train/data.py",
        "import numpy, json\nfrom PIL import Image",
    ),
    (files_are_short, "dlion/codecs.py", "x = 1\n" * 300),
    (functions_are_short, "dlion/codecs.py", LONG_FUNCTION.replace("    x = 1\n", '    """Say it."""\n', 1)),
]


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_a_good_snippet_is_left_alone(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(Source(path, text)))


def test_a_private_name_needs_an_entry_and_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Source("dlion/optim.py", "from torch.optim.optimizer import _hook")
    kept = Source("dlion/optim.py", "try:\n    from torch.optim.optimizer import _hook\nexcept ImportError:\n    raise")
    assert list(torch_is_used_by_its_public_names(kept))
    monkeypatch.setitem(PRIVATE_TORCH, "dlion/optim.py", {"torch.optim.optimizer._hook": "no public hook"})
    assert list(torch_is_used_by_its_public_names(bare))
    assert not list(torch_is_used_by_its_public_names(kept))


def test_no_exception_outlives_its_cause() -> None:
    lengths = {source.path: len(source.text.splitlines()) for source in sources()}
    assert all(lengths.get(path, 0) > MAX_FILE_LINES for path in LONG_FILES)
    used = {source.path: {dotted for _, dotted in source.uses} for source in sources()}
    assert all(set(names) <= used.get(path, set()) for path, names in PRIVATE_TORCH.items())
