"""The CPU backend, and the reference of all numbers. Knows threads, host memory and packed weights."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from pluglm.backends.compiled import compiled_rows
from pluglm.backends.cpu_kernels import choose_kernels
from pluglm.backends.dtypes import torch_dtype
from pluglm.backends.memory import available_memory
from pluglm.backends.rows import TiledRows, whole_rows
from pluglm.backends.torch_backend import TorchBackend
from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.backend import BackendContext
from pluglm.kernel.interfaces.component import BATCH_INVARIANT, LAYER_GROUPS, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kernels import KernelLog
from pluglm.kernel.interfaces.kv import KVLayout, KVStore
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import ModelSpec, RowMap
from pluglm.kv.store import TensorKVStore
from pluglm.native.threads import default_threads
from pluglm.native.tools import SPIN_US

_MAX_DETERMINISTIC_THREADS = 2  # more split an elementwise kernel inside a row; see TiledRows


class CpuConfig(ComponentConfig):
    """kernels: `native` ones are built in C++ at first use, `auto` takes them if it can, else torch's.

    isa: which instructions the native kernels use, `auto` the best that the CPU has. spin_us: how many microseconds
    their threads spin before they sleep; 0 suits a machine with more busy threads than cores. compile: with kernels
    `torch`, a layer around its attention and the head go through torch.compile.
    """

    kernels: Literal["auto", "native", "torch"] = "auto"
    isa: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "baseline"] = "auto"
    spin_us: int = Field(default=SPIN_US, ge=0, le=100_000)
    compile: bool = False

    @model_validator(mode="after")
    def _native_keys_are_used(self) -> Self:
        """By value, not by what was written: a config that spells out every default is the same config."""
        defaults = {"isa": "auto", "spin_us": SPIN_US}
        given = [name for name, default in defaults.items() if getattr(self, name) != default]
        if self.kernels == "torch" and given:
            raise ValueError(f"{' and '.join(given)} govern native kernels and kernels is torch; leave one of them out")
        if self.compile and self.kernels != "torch":
            raise ValueError(f"compile is for the functions of torch and kernels is {self.kernels}; set kernels: torch")
        return self


class CpuBackend(TorchBackend):
    """Runs on the host in float32, bfloat16 or (slow on most CPUs) float16.

    Deterministic mode is float32 with rows in tiles of one shape, on one or two threads: then a row's bits depend on
    nothing but its own sequence. Loading and executing set torch's thread count and put the old one back.
    """

    interface_version = 1
    Config = CpuConfig

    def __init__(self, config: CpuConfig, context: BackendContext) -> None:
        dtype = torch_dtype(context.dtype, "cpu")
        num_threads = _deterministic_threads(context) if context.deterministic else context.num_threads
        log = KernelLog()
        chosen = choose_kernels(config, dtype, num_threads or default_threads(), context.deterministic, log)
        self.tools = chosen.tools
        super().__init__(
            "cpu",
            dtype,
            make_linear=chosen.make_linear,
            map_rows=_row_map(config, context, log),
            num_threads=num_threads,
            fuser=chosen.fuser,
            kernels=log,
        )

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({BATCH_INVARIANT, LAYER_GROUPS}))

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def make_store(self, layout: KVLayout, spec: ModelSpec, kv_format: KVFormat | None) -> KVStore:
        """In huge pages with native kernels: attention over a long context reads them at twice the rate."""
        if self.tools is None:
            return super().make_store(layout, spec, kv_format)
        return TensorKVStore(layout, spec, self.device, self._dtype, self.tools.empty, kv_format)

    def free_memory(self) -> int:
        return available_memory()


def _row_map(config: CpuConfig, context: BackendContext, log: KernelLog) -> RowMap:
    if not config.compile:
        return TiledRows() if context.deterministic else whole_rows
    if context.deterministic:
        raise IncompatibleError(
            "backend 'cpu': compile reorders arithmetic, so bits are not those of deterministic runs; "
            "set backend.compile: false or deterministic: false"
        )
    return compiled_rows("cpu", log, refused=("native",))


def _deterministic_threads(context: BackendContext) -> int:
    if context.dtype != "float32":
        raise IncompatibleError(
            f"backend 'cpu' is deterministic in float32 only, not in {context.dtype}, which rounds by batch shape; "
            "set dtype: float32 or deterministic: false"
        )
    if context.num_threads is not None and context.num_threads > _MAX_DETERMINISTIC_THREADS:
        raise IncompatibleError(
            f"backend 'cpu' is deterministic on at most {_MAX_DETERMINISTIC_THREADS} threads, more would split kernels "
            f"inside a row; set num_threads: 2 (not {context.num_threads}) or deterministic: false"
        )
    return context.num_threads or min(_MAX_DETERMINISTIC_THREADS, torch.get_num_threads())
