"""A torch backend that runs decode steps as captured graphs where it can. Knows no device by name."""

from __future__ import annotations

import torch

from pluglm.backends.execute import picked_rows
from pluglm.backends.graphs import DecodeGraphs
from pluglm.backends.scratch_store import ScratchKVStore, has_scratch
from pluglm.backends.threads import thread_count
from pluglm.backends.torch_backend import TorchBackend
from pluglm.kernel.core import ModelInput
from pluglm.kernel.interfaces.attention import Attention
from pluglm.kernel.interfaces.kernels import KernelChoice, KernelLog
from pluglm.kernel.interfaces.kv import KVLayout, KVStore
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import Fuser, LinearFactory, Model, ModelSpec, RowMap, RowPicker


class GraphBackend(TorchBackend):
    """graphs: None turns them off. Else KV memory has one block more than the layout, for rows that fill a batch up."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        make_linear: LinearFactory,
        map_rows: RowMap,
        num_threads: int | None,
        graphs: DecodeGraphs | None,
        fuser: Fuser | None = None,
        kernels: KernelLog | None = None,
        pick_rows: RowPicker = picked_rows,
    ) -> None:
        super().__init__(device, dtype, make_linear, map_rows, num_threads, fuser, kernels, pick_rows)
        self.graphs = graphs

    def make_store(self, layout: KVLayout, spec: ModelSpec, kv_format: KVFormat | None) -> KVStore:
        if self.graphs is None or not has_scratch(layout):
            return super().make_store(layout, spec, kv_format)
        return ScratchKVStore(layout, spec, self.device, self._dtype, kv_format)

    def execute(self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> torch.Tensor:
        if self.graphs is not None:
            with thread_count(self._num_threads):
                logits_RV = self.graphs.run(model, inputs, attention, kv)
            self._record(logits_RV is not None)
            if logits_RV is not None:
                return logits_RV
        return super().execute(model, inputs, attention, kv)

    def execute_open(
        self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Never as a graph, which keeps no hidden states."""
        if self.graphs is not None:
            self.kernels.add(KernelChoice("step", "eager", (("graph", "the drafter reads hidden states"),)))
        return super().execute_open(model, inputs, attention, kv)

    def _record(self, by_graph: bool) -> None:
        """Each reason once; how often each was met is in `graphs.counts`."""
        if by_graph:
            self.kernels.add(KernelChoice("step", "graph"))
        elif self.graphs is not None and self.graphs.last is not None:
            self.kernels.add(KernelChoice("step", "eager", (("graph", self.graphs.last.reason),)))
