"""Triton kernels compiled ahead of time, without a GPU: what each costs in registers, spills and shared memory.

The figures are those that triton's own assembler run prints for the very binary it would load, not of a second run.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pluglm.triton_kernels.availability import not_installed

# Bytes of shared memory that one program may use, by compute capability (CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability", less the 1 KiB that the system keeps of each block).
SHARED_LIMITS: Mapping[int, int] = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
ARCHITECTURES: tuple[int, ...] = tuple(SHARED_LIMITS)

# PTX opcodes that tell whether tensor cores, pipelined copies and wide loads are in use.
WATCHED: tuple[str, ...] = (
    "wgmma.mma_async",
    "tcgen05.mma",
    "mma.sync",
    "cp.async.bulk",
    "cp.async",
    "ld.global",
    "ld.global.v4",
    "st.global",
    "st.global.v4",
)

_WARP = 32
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_WAITS = frozenset(("commit_group", "wait_group", "wait_all"))
_OPCODE = re.compile(r"(?:^|\s)((?:ld|st|cp|mma|wgmma|tcgen05)(?:[.:]+\w+)+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One kernel as a launcher would start it; the fields are the arguments of compile_kernel."""

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: frozenset[str]
    num_warps: int = 4
    num_stages: int = 3

    def compile(self, arch: int) -> CompileReport:
        return compile_kernel(
            self.fn, self.signature, self.constexprs, arch, self.num_warps, self.num_stages, self.divisible
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """registers: of a thread; spills and shared_bytes in bytes; instructions: how often each of WATCHED stands in
    the PTX, those with a longer name of the list under each that they have all parts of."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    instructions: dict[str, int]


def compile_kernel(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    arch: int,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible: Iterable[str] = (),
) -> CompileReport:
    """Compiles a triton JITFunction (of an autotuned one: its `.fn`) for compute capability `arch`, as in 90.

    signature: triton's type name ("*bf16", "*u8", "*fp8e4nv", "i32", "i64", "fp32") of every run-time argument;
    constexprs: the value of every other argument. divisible: pointers and integers known to be multiples of 16;
    without it there are no wide loads. Always compiles anew; binaries go to triton's cache (TRITON_CACHE_DIR).
    ValueError when arguments are left over or missing, the interpreter is on, or triton is not installed; errors of
    triton's compiler are its own. Changes triton's global settings while it runs: not for two threads at a time.
    """
    if reason := not_installed():
        raise ValueError(f"kernels cannot be compiled here: {reason}")
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from triton.compiler import ASTSource  # type: ignore[import-not-found, import-untyped, unused-ignore]

    if not isinstance(fn, triton.JITFunction):
        raise ValueError(f"{fn!r} is no JITFunction; turn TRITON_INTERPRET off, and of an autotuned kernel give `.fn`")
    types = _types(list(fn.arg_names), signature, constexprs)
    attributes = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(fn, types, constexprs=dict(constexprs), attrs=attributes)
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        options = {"num_warps": num_warps, "num_stages": num_stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, _WARP), options=options)
    return read_report(log.getvalue(), compiled.asm["ptx"], int(compiled.metadata.shared))


def read_report(log: str, ptx: str, shared_bytes: int) -> CompileReport:
    """log: what `ptxas -v` printed; of several functions the most registers, and all spills."""
    registers, spills = _REGISTERS.findall(log), _SPILLS.findall(log)
    if not registers or not spills:
        raise ValueError(f"the assembler said nothing of registers or spills: {log.strip()!r}")
    opcodes = Counter(_OPCODE.findall(ptx))
    return CompileReport(
        registers=max(map(int, registers)),
        spill_stores=sum(int(stores) for stores, _ in spills),
        spill_loads=sum(int(loads) for _, loads in spills),
        shared_bytes=shared_bytes,
        instructions={name: _count(name, opcodes) for name in WATCHED},
    )


def _count(name: str, opcodes: Counter[str]) -> int:
    """Opcodes with all parts of `name`, others between allowed (ld.global.L1::evict_last.v4.b32), waits left out."""
    first, *others = name.split(".")
    wanted = set(others)
    found = 0
    for opcode, times in opcodes.items():
        head, *parts = opcode.split(".")
        if head == first and wanted.issubset(parts) and _WAITS.isdisjoint(parts):
            found += times
    return found


def _types(names: list[str], signature: Mapping[str, str], constexprs: Mapping[str, Any]) -> dict[str, str]:
    """Every argument in order, a constexpr by that name."""
    unknown = sorted((signature.keys() | constexprs.keys()) - set(names))
    missing = [name for name in names if name not in signature and name not in constexprs]
    twice = sorted(signature.keys() & constexprs.keys())
    if unknown or missing or twice:
        raise ValueError(f"arguments unknown {unknown}, missing {missing}, given as type and as value {twice}")
    return {name: signature.get(name, "constexpr") for name in names}
