"""The backend for NVIDIA GPUs through torch. Imports anywhere; knows one device and its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator

from pluglm.backends.compiled import compiled_rows
from pluglm.backends.cuda_graphs import CudaGraphTools
from pluglm.backends.dtypes import torch_dtype
from pluglm.backends.execute import picked_rows
from pluglm.backends.graph_backend import GraphBackend
from pluglm.backends.graph_buckets import BATCH_SIZES
from pluglm.backends.graphs import DecodeGraphs
from pluglm.backends.linear import DenseLinear
from pluglm.backends.rows import whole_rows
from pluglm.backends.triton_choice import KernelName, choose_fuser
from pluglm.kernel.core import ModelInput
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.attention import Attention
from pluglm.kernel.interfaces.backend import BackendContext
from pluglm.kernel.interfaces.component import DETERMINISTIC, LAYER_GROUPS, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.footprint import Footprint, WeightKind
from pluglm.kernel.interfaces.kernels import KernelLog
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import Model
from pluglm.triton_kernels.fuser import KERNEL as TRITON
from pluglm.triton_kernels.gather import gather_rows


class CudaConfig(ComponentConfig):
    """index: which visible GPU, counted from 0.

    kernels: what computes between the products of a layer; `auto` takes `triton` if it can, else torch's. compile: with
    kernels `torch`, a layer around its attention and the head go through torch.compile.

    graphs: decode steps run as captured graphs where the attention has plans for them. graph_batch_sizes: rows of a
    graph, ascending; a step takes the least that it fits in, and is captured when that is first needed.
    """

    index: int = Field(default=0, ge=0)
    kernels: KernelName = "auto"
    compile: bool = False
    graphs: bool = True
    graph_batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=BATCH_SIZES, min_length=1)

    @model_validator(mode="after")
    def _sizes_ascend_and_are_used(self) -> Self:
        sizes = self.graph_batch_sizes
        if list(sizes) != sorted(set(sizes)):
            raise ValueError(f"graph_batch_sizes {list(sizes)} do not ascend; give each size once, the least first")
        if not self.graphs and sizes != BATCH_SIZES:  # a config may spell out every default
            raise ValueError("graph_batch_sizes are given and graphs is false; leave one of them out")
        return self

    @model_validator(mode="after")
    def _compile_is_used(self) -> Self:
        if self.compile and self.kernels != "torch":
            raise ValueError(f"compile is for the functions of torch and kernels is {self.kernels}; set kernels: torch")
        return self


class CudaBackend(GraphBackend):
    """Runs on one GPU: products are torch's, what stands between them is Triton's where that runs.

    Logits stay on the device. num_threads governs its work on the host.
    """

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
        device = f"cuda:{config.index}"
        graphs = DecodeGraphs(CudaGraphTools(device), config.graph_batch_sizes, device) if config.graphs else None
        log = KernelLog()
        fuser = None if config.compile else choose_fuser(config.kernels, device, log)
        map_rows = compiled_rows(device, log, refused=(TRITON,)) if config.compile else whole_rows
        pick_rows = picked_rows if fuser is None else gather_rows
        super().__init__(device, dtype, DenseLinear, map_rows, context.num_threads, graphs, fuser, log, pick_rows)

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

    def weight_footprint(self, num_bytes: int, kind: WeightKind, num_parts: int) -> Footprint:
        """A weight is read on the host and used where it first lies on the device, with a fuser or without."""
        return Footprint(num_bytes, 0)

    def launch(self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> Callable[[], torch.Tensor]:
        """`execute` queues the work and waits for none of it; whoever copies from the logits does."""
        logits_RV = self.execute(model, inputs, attention, kv)
        return lambda: logits_RV

    def free_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        held_unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + held_unused
