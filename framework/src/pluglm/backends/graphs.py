"""Decode steps as captured graphs, one for each batch bucket, made when it is first needed.

A graph replays kernels on fixed addresses: one launch instead of hundreds. Whatever the host decides while it is
captured stays as it was, so the attention has to declare that it can (GraphAttention), and a model whose rotation
depends on prompt lengths cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from pluglm.backends.graph_buckets import CAPTURED, REPLAYED, TOO_LONG, GraphDecision, StepLimits, bucket_of, why_eager
from pluglm.backends.graph_buffers import DecodeBuffers
from pluglm.backends.scratch_store import ScratchKVStore
from pluglm.kernel.core import ModelInput
from pluglm.kernel.interfaces.attention import Attention, GraphAttention
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec, Model
from pluglm.kernel.interfaces.target import FedModel

# B: rows of the graph, R: rows of a step, V: vocabulary, N: query heads, K: kv heads, H: head dim


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured function: `replay` does its work again and leaves the result in `output`, at the same address."""

    replay: Callable[[], None]
    output: torch.Tensor


class GraphTools(Protocol):
    """How a device captures. RuntimeError when the function does what cannot be captured."""

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured: ...


@dataclass(slots=True)
class _Graph:
    buffers: DecodeBuffers
    plan: Any
    captured: Captured


class ModelGraphs:
    """The graphs of one model, with the attention and the KV memory that it was first run with.

    Each graph keeps its own output: rows x vocabulary x 4 bytes.
    """

    def __init__(self, tools: GraphTools, model: Model, attention: Attention, kv: KVStore, device: str) -> None:
        self.model, self.attention, self.kv = model, attention, kv
        self._tools, self._device = tools, device
        self._limits = StepLimits.of(kv.layout, model.spec)
        self._graphs: dict[int, _Graph] = {}
        self._failures: dict[int, str] = {}
        self._refusal = _refusal(model, attention, kv)

    def why_eager(self, inputs: ModelInput, attention: Attention, kv: KVStore) -> str | None:
        reason = why_eager(inputs, self._limits)
        if reason == TOO_LONG:
            self._graphs.clear()  # the model's tables of angles may grow now, and move
        if self._refusal or reason:
            return self._refusal or reason
        if attention is not self.attention or kv is not self.kv:
            return "the model has graphs with another attention or KV memory"
        return None

    def run(self, inputs: ModelInput, bucket: int) -> tuple[GraphDecision, torch.Tensor | None]:
        """logits_RV, which later steps leave alone; or the reason why there is no graph of this bucket."""
        is_new = bucket not in self._graphs
        if is_new and bucket not in self._failures:
            self._capture(bucket)
        if bucket in self._failures:
            return GraphDecision(self._failures[bucket]), None
        graph = self._graphs[bucket]
        cast(GraphAttention, self.attention).refill(graph.plan, graph.buffers.fill(inputs))
        graph.captured.replay()
        # The next replay, of any bucket, may write to the memory of the output.
        logits_RV = graph.captured.output[: len(inputs.segments)].clone()
        return GraphDecision(CAPTURED if is_new else REPLAYED, bucket), logits_RV

    def _capture(self, bucket: int) -> None:
        """Touches the scratch block alone: the graph is captured with dummy rows."""
        model, attention, kv = self.model, self.attention, cast(ScratchKVStore, self.kv)
        buffers = DecodeBuffers(bucket, kv.layout.block_size, kv.scratch_block, self._limits, self._device)
        plan = cast(GraphAttention, attention).static_plan(buffers.dummy_batch(), self._limits.max_blocks)
        inputs = buffers.inputs()

        def attend(layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            return attention.run(layer, q_TNH, k_TKH, v_TKH, plan, kv.whole)

        try:
            captured = self._tools.capture(lambda: model.logits(model.forward(inputs, attend)))
        except RuntimeError as error:
            self._failures[bucket] = f"capturing {bucket} rows failed: {' '.join(str(error).split())}"
        else:
            self._graphs[bucket] = _Graph(buffers, plan, captured)


class DecodeGraphs:
    """Runs the steps that it can as graphs. counts: how often each decision was taken; last: the latest one.

    batch_sizes: ascending. Steps that do not qualify, and those whose capture failed, are left to the caller.
    """

    def __init__(self, tools: GraphTools, batch_sizes: tuple[int, ...], device: str) -> None:
        self._tools, self._batch_sizes, self._device = tools, batch_sizes, device
        self._models: dict[int, ModelGraphs] = {}  # by identity; each holds its model
        self.counts: Counter[GraphDecision] = Counter()
        self.last: GraphDecision | None = None

    @torch.inference_mode()
    def run(self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> torch.Tensor | None:
        """logits_RV of a batch whose tensors are on the host, or None when it has to run eagerly."""
        if id(model) not in self._models:
            self._models[id(model)] = ModelGraphs(self._tools, model, attention, kv, self._device)
        graphs = self._models[id(model)]
        bucket = bucket_of(len(inputs.segments), self._batch_sizes)
        logits_RV = None
        if reason := graphs.why_eager(inputs, attention, kv):
            self.last = GraphDecision(reason)
        elif bucket is None:
            self.last = GraphDecision(f"more rows than the largest graph has, {self._batch_sizes[-1]}")
        else:
            self.last, logits_RV = graphs.run(inputs, bucket)
        self.counts[self.last] += 1
        return logits_RV


def _refusal(model: Model, attention: Attention, kv: KVStore) -> str | None:
    """Why no step of these parts can be a graph, or None."""
    # isinstance does not see through the engine's proxies from Python 3.12 on.
    if not all(callable(getattr(attention, name, None)) for name in ("static_plan", "refill")):
        return "the attention has no plans for graphs"
    if not isinstance(kv, ScratchKVStore):
        return "the KV layout has groups, or blocks too large to have one to spare"
    if isinstance(model, FedModel):
        return "the model goes on from rows that each step brings anew"
    if model.spec.kv_of_prompt_length:
        return "the model's rotation depends on the length of the prompt"
    return None
