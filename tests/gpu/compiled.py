"""Compile the Triton kernels for a GPU that is not here and print what the code looks like, one JSON object a kernel.

    python tests/gpu/compiled.py 90           an architecture of NVIDIA's, or gfx942 and such of AMD's
    python tests/gpu/compiled.py 90 0 4       the first quarter

It needs a process where Triton does not interpret. What is compiled: every kernel, with what the optimizer asks of it.
"element" is what each element of a whole chunk costs: instructions, those among them that run at half rate, and bytes
of memory. It is counted in the machine code, by path.py, and not measured.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlion.ops import triton_hash, triton_headers, triton_kernels, triton_numbers, triton_tally

THREADS = 32 * triton_kernels.LAUNCH["num_warps"]
BYTES = {tl.float32: 4, tl.bfloat16: 2, tl.float16: 2}
POINTERS = {
    "owners": "*i32",
    "pieces": "*i64",
    "addresses": "*i64",
    "betas": "*fp32",
    "tables": "*fp32",
    "clock": "*i64",
    "words": "*i64",
    "planes": "*i64",
    "finite": "*i1",
    "awake": "*i1",
    "ballots": "*i64",
    "verdict": "*i64",
    "memory": "*u8",
    "totals": "*i64",
    "roster": "*i64",
    "hyper": "*i64",
    "header": "*i64",
    "headers": "*i64",
    "own": "*i64",
    "entries": "*i64",
    "voters": "*i64",
    "applied": "*fp64",
    "steps": "*fp32",
}
MODULES = (triton_hash, triton_kernels, triton_tally, triton_headers, triton_numbers)
NOTHING = {"loads": 0, "stores": 0}
TIES = [(False, "rotate"), (False, "alternate"), (True, "rotate"), (True, "alternate"), (True, "zero")]


def variants() -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """Kernel, what it is compiled for, and how many 16-byte loads and stores a thread makes of a whole chunk."""
    made: list[tuple[Any, dict[str, Any], dict[str, int]]] = []
    for grad, momentum, ternary in product(BYTES, (tl.float32, tl.bfloat16), (False, True)):
        how = {"GRAD": grad, "MOMENTUM": momentum, "TERNARY": ternary}
        moved = {"loads": BYTES[grad] + BYTES[momentum], "stores": BYTES[momentum]}  # 16 elements of each
        made.append((triton_kernels.ballot, how, moved))
    for param, planes, stochastic in product(BYTES, (1, 2, 5), (False, True)):
        if param != tl.float32 or not stochastic:
            how = {"PARAM": param, "PLANES": planes, "STOCHASTIC": stochastic}
            made.append((triton_kernels.apply, how, {"loads": BYTES[param], "stores": BYTES[param]}))
    made.append((triton_hash.sums, {}, {"loads": 4, "stores": 0}))
    for planes in (3, 7):
        for ternary, ties in TIES:
            how = {"TERNARY": ternary, "TIES": ties, "PLANES": planes}
            made.append((triton_tally.majority, how, {"loads": 4 * (1 + ternary), "stores": 1 + ternary}))
        for ternary in (False, True):
            how = {"TERNARY": ternary, "WANTED": planes + ternary, "PLANES": planes}
            made.append((triton_tally.count, how, {"loads": 4 * (1 + ternary), "stores": planes + ternary}))
    for how in ({}, {"awake": None}, {"awake": None, "finite": None}):
        made.append((triton_headers.ballot_header, how, NOTHING))
    for kernel in (triton_headers.judge, triton_headers.enter):
        made.append((kernel, {"ROWS": triton_headers.ROWS}, NOTHING))
    made.append((triton_headers.close, {}, NOTHING))
    for meaning, planes in (("sign", 1), ("ternary", 2), ("count", 4), ("sum", 12)):
        how = {"MEANING": meaning, "PLANES": planes, "LEVELS": min(2**planes, triton_numbers.LEVELS)}
        made.append((triton_numbers.numbers, how, NOTHING))
    return made


def compiled(kernel: Any, how: dict[str, Any], target: GPUTarget) -> Any:
    home = next(module for module in MODULES if kernel in vars(module).values())
    launch = dict(triton_kernels.launch(kernel) if home is triton_kernels else home.LAUNCH)
    constants = how | {name: launch.pop(name) for name in ("CHUNK", "PART", "WORDS") if name in launch}
    if target.backend == "hip":
        launch.pop("maxnreg", None)
    annotated = {param.name: param.annotation_type for param in kernel.params}
    signature = {
        name: "constexpr" if name in constants else annotated[name] or POINTERS[name] for name in kernel.arg_names
    }
    return triton.compile(ASTSource(kernel, signature, constants), target=target, options=launch)


def of_nvidia(code: Any, turns: int) -> dict[str, Any]:
    """Vector accesses, spills and fused multiplications: in PTX, and in the instructions that a processor executes; and
    how often it executes which, with so many turns of the loop over whole parts.
    """
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(code.asm["cubin"])
        show = {"capture_output": True, "text": True, "check": True}
        text = subprocess.run([tools / "nvdisasm", "-c", binary], **show).stdout
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", binary], **show).stdout
    found = Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE))
    ptx = code.asm["ptx"]
    return {
        "instructions": found,
        "executed": path.executed(text, turns) if turns else Counter(),
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack": [int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)],
        "divisions": re.findall(r"\bdiv\.\w+\.f\d+", ptx),  # of floats; a processor makes them of fused steps
        "fused": re.findall(r"\bfma\.\S+", ptx),
        "flushing": re.findall(r"\S+\.ftz\S*", ptx),
        "local": re.findall(r"\b(?:ld|st)\.local\S*", ptx),
        "vectors": Counter(re.findall(r"\b(?:ld|st)\.global\S*\.v\d\.\S+", ptx)),
    }


def of_amd(code: Any, turns: int) -> dict[str, Any]:
    text = code.asm["amdgcn"]
    return {"fused": re.findall(r"\bv_(?:pk_)?(?:fma|mac|mad|fmac)_f32\S*", text), "text": len(text)}


def main(target: str, part: int, parts: int) -> None:
    amd = target.startswith("gfx")
    aim = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target), 32)
    for kernel, how, moved in variants()[part::parts]:
        turns = triton_kernels.CHUNK // triton_kernels.PART if kernel in vars(triton_kernels).values() else 0
        facts = (of_amd if amd else of_nvidia)(compiled(kernel, how, aim), turns)
        name = " ".join([kernel.fn.__name__, *(f"{key}={value}" for key, value in how.items())])
        if executed := facts.get("executed"):
            elements = turns * triton_kernels.PART // THREADS
            planes = how.get("PLANES", 1 + how.get("TERNARY", False))
            facts["element"] = {
                "instructions": executed.total() / elements,
                "at half rate": path.at_half_rate(executed) / elements,
                "products": executed["FMUL"] / elements,
                "bytes": sum(moved.values()) + planes / 8,
            }
            facts["turns"] = turns
        print(json.dumps({"kernel": name, "moved": moved} | facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:] or (0, 1)))
