"""The backend for NVIDIA GPUs through torch. Imports anywhere; knows one device and its memory."""

from __future__ import annotations

import time
from typing import Any

import torch
from pydantic import Field

from pluglm.backends.dtypes import torch_dtype
from pluglm.backends.execute import execute_batch, inputs_on
from pluglm.backends.linear import DenseLinear
from pluglm.backends.rows import whole_rows
from pluglm.backends.threads import thread_count
from pluglm.kernel.core import ModelInput
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.attention import Attention
from pluglm.kernel.interfaces.backend import Backend, BackendContext
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import KVLayout, KVStore
from pluglm.kernel.interfaces.model import LinearFactory, Model, ModelContext, ModelSpec
from pluglm.kernel.interfaces.services import Progress
from pluglm.kv.store import TensorKVStore


class CudaConfig(ComponentConfig):
    """index: which visible GPU, counted from 0."""

    index: int = Field(default=0, ge=0)


class CudaBackend(Backend):
    """Runs on one GPU with torch's own kernels; logits stay on the device. num_threads governs its work on the host."""

    interface_version = 1
    Config = CudaConfig

    def __init__(self, config: CudaConfig, context: BackendContext) -> None:
        if reason := self.unavailable():
            raise PluginError(f"backend 'cuda' cannot run here: {reason}; use backend 'cpu'")
        if config.index >= torch.cuda.device_count():
            raise PluginError(
                f"backend 'cuda': index {config.index} is not visible, there are {torch.cuda.device_count()} devices; "
                "set a lower backend.index"
            )
        self.device = f"cuda:{config.index}"
        self._dtype = torch_dtype(context.dtype, "cuda")
        self._num_threads = context.num_threads

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        reason = "GPU matrix kernels are chosen by batch shape, so a row's bits depend on its batch"
        return Capabilities(refuses={"run:deterministic": reason})

    @classmethod
    def unavailable(cls) -> str | None:
        if torch.version.cuda is None:
            return "torch was built without CUDA"
        if not torch.cuda.is_available():
            return "no CUDA device is visible"
        return None

    def now(self) -> float:
        return time.perf_counter()

    def free_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        held_unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + held_unused

    def load_model(
        self, family: type[Model], checkpoint: Checkpoint, make_linear: LinearFactory | None, progress: Progress
    ) -> Model:
        context = ModelContext(
            device=self.device,
            dtype=self._dtype,
            make_linear=make_linear or DenseLinear,
            map_rows=whole_rows,
            progress=progress,
        )
        with thread_count(self._num_threads):
            return family.load(checkpoint, context)

    def allocate_kv(self, layout: KVLayout, spec: ModelSpec) -> KVStore:
        return TensorKVStore(layout, spec, self.device, self._dtype)

    def execute(self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> torch.Tensor:
        with thread_count(self._num_threads):
            return execute_batch(model, inputs_on(inputs, self.device), attention, kv)
