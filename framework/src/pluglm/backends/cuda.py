"""The backend for NVIDIA GPUs through torch. Imports anywhere; knows one device and its memory."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from pluglm.backends.dtypes import torch_dtype
from pluglm.backends.linear import DenseLinear
from pluglm.backends.rows import whole_rows
from pluglm.backends.torch_backend import TorchBackend
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.backend import BackendContext
from pluglm.kernel.interfaces.component import DETERMINISTIC, LAYER_GROUPS, Capabilities, ComponentConfig


class CudaConfig(ComponentConfig):
    """index: which visible GPU, counted from 0."""

    index: int = Field(default=0, ge=0)


class CudaBackend(TorchBackend):
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
        dtype = torch_dtype(context.dtype, "cuda")
        super().__init__(f"cuda:{config.index}", dtype, DenseLinear, whole_rows, context.num_threads)

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        reason = "GPU matrix kernels are chosen by batch shape, so a row's bits depend on its batch"
        return Capabilities(provides=frozenset({LAYER_GROUPS}), refuses={DETERMINISTIC: reason})

    @classmethod
    def unavailable(cls) -> str | None:
        if torch.version.cuda is None:
            return "torch was built without CUDA"
        if not torch.cuda.is_available():
            return "no CUDA device is visible"
        return None

    def free_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        held_unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + held_unused
