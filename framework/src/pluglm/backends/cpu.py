"""The CPU backend, and the reference of all numbers. Knows threads, host memory and packed weights."""

from __future__ import annotations

import time
from typing import Any

import torch

from pluglm.backends.dtypes import torch_dtype
from pluglm.backends.execute import execute_batch
from pluglm.backends.linear import DenseLinear, PackedLinear, can_pack
from pluglm.backends.memory import available_memory
from pluglm.backends.rows import TiledRows, whole_rows
from pluglm.backends.threads import thread_count
from pluglm.kernel.core import ModelInput
from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.attention import Attention
from pluglm.kernel.interfaces.backend import Backend, BackendContext
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import KVLayout, KVStore
from pluglm.kernel.interfaces.model import LinearFactory, Model, ModelContext, ModelSpec
from pluglm.kernel.interfaces.services import Progress
from pluglm.kv.store import TensorKVStore

_MAX_DETERMINISTIC_THREADS = 2  # more split an elementwise kernel inside a row; see TiledRows


class CpuBackend(Backend):
    """Runs on the host in float32, bfloat16 or (slow on most CPUs) float16.

    Deterministic mode is float32 with rows in tiles of one shape, on one or two threads: then a row's bits depend on
    nothing but its own sequence. Loading and executing set torch's thread count and put the old one back.
    """

    interface_version = 1
    Config = ComponentConfig
    device = "cpu"

    def __init__(self, config: ComponentConfig, context: BackendContext) -> None:
        self._dtype = torch_dtype(context.dtype, "cpu")
        self._deterministic = context.deterministic
        self._num_threads = context.num_threads
        if context.deterministic:
            self._num_threads = _deterministic_threads(context)
        self._make_linear = PackedLinear if can_pack(self._dtype) else DenseLinear

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({"numerics:batch_invariant"}))

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def now(self) -> float:
        return time.perf_counter()

    def free_memory(self) -> int:
        return available_memory()

    def load_model(
        self, family: type[Model], checkpoint: Checkpoint, make_linear: LinearFactory | None, progress: Progress
    ) -> Model:
        context = ModelContext(
            device=self.device,
            dtype=self._dtype,
            make_linear=make_linear or self._make_linear,
            map_rows=TiledRows() if self._deterministic else whole_rows,
            progress=progress,
        )
        with thread_count(self._num_threads):
            return family.load(checkpoint, context)

    def allocate_kv(self, layout: KVLayout, spec: ModelSpec) -> KVStore:
        return TensorKVStore(layout, spec, self.device, self._dtype)

    def execute(self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> torch.Tensor:
        with thread_count(self._num_threads):
            return execute_batch(model, inputs, attention, kv)


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
