"""What the backends that compute with torch share: clock, loading, KV storage, execution. Knows no device by name."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pluglm.backends.execute import execute_batch, execute_open_batch, inputs_on, picked_rows
from pluglm.backends.linear import PackedLinear
from pluglm.backends.threads import thread_count
from pluglm.kernel.core import ModelInput
from pluglm.kernel.interfaces.attention import Attention
from pluglm.kernel.interfaces.backend import Backend
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.footprint import Footprint, WeightKind
from pluglm.kernel.interfaces.kernels import KernelLog
from pluglm.kernel.interfaces.kv import KVLayout, KVStore
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import Fuser, LinearFactory, Model, ModelContext, ModelSpec, RowMap, RowPicker
from pluglm.kernel.interfaces.services import Progress
from pluglm.kv.store import TensorKVStore
from pluglm.process_memory import giving_back


class TorchBackend(Backend):
    """A backend on one torch device; a subclass says which, and what is available on it.

    make_linear: the plain layers of this device; map_rows: how models apply row-wise functions; num_threads: torch's
    count on the host while a model loads or runs, None for the one it has; fuser: how whole layers are computed, None
    for the family's own functions; pick_rows: how rows with logits are gathered.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        make_linear: LinearFactory,
        map_rows: RowMap,
        num_threads: int | None,
        fuser: Fuser | None = None,
        kernels: KernelLog | None = None,
        pick_rows: RowPicker = picked_rows,
    ) -> None:
        self.device = device
        self._dtype = dtype
        self._make_linear = make_linear
        self._map_rows = map_rows
        self._num_threads = num_threads
        self._fuser = fuser
        self._pick_rows = pick_rows
        self.kernels = KernelLog() if kernels is None else kernels

    def now(self) -> float:
        return time.perf_counter()

    def load_model(
        self, family: type[Model], checkpoint: Checkpoint, make_linear: LinearFactory | None, progress: Progress
    ) -> Model:
        context = ModelContext(
            device=self.device,
            dtype=self._dtype,
            make_linear=make_linear or self._make_linear,
            map_rows=self._map_rows,
            progress=giving_back(progress) if self.device == "cpu" else progress,
            fuser=self._fuser,
        )
        with thread_count(self._num_threads):
            return family.load(checkpoint, context)

    def weight_footprint(self, num_bytes: int, kind: WeightKind, num_parts: int) -> Footprint:
        if self._fuser is not None:
            return Footprint(self._fuser.placed_bytes(num_bytes), num_bytes if num_parts == 1 else 0)
        is_packed = kind == "linear" and self._make_linear is PackedLinear
        return Footprint(num_bytes, num_bytes if is_packed else 0)

    def allocate_kv(self, layout: KVLayout, spec: ModelSpec) -> KVStore:
        return self.make_store(layout, spec, None)

    def allocate_encoded_kv(self, layout: KVLayout, spec: ModelSpec, kv_format: KVFormat) -> KVStore:
        return self.make_store(layout, spec, kv_format)

    def make_store(self, layout: KVLayout, spec: ModelSpec, kv_format: KVFormat | None) -> KVStore:
        """In this device's memory."""
        return TensorKVStore(layout, spec, self.device, self._dtype, kv_format=kv_format)

    def execute(self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> torch.Tensor:
        with thread_count(self._num_threads):
            return execute_batch(model, inputs_on(inputs, self.device), attention, kv, self._pick_rows)

    def execute_open(
        self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with thread_count(self._num_threads):
            return execute_open_batch(model, inputs_on(inputs, self.device), attention, kv, self._pick_rows)

    def compute(self, function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        with thread_count(self._num_threads), torch.inference_mode():
            return function(rows.to(self.device))
