"""The kit of attention is tested: a plain loop passes, and for every check one broken class fails only that check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.testing.attention import attention_checks
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim, C: keys that a row sees


class LoopAttention:
    """Row by row and head by head: the bits of a row depend on its own keys alone. Methods are what fixtures break."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.dtype = context.dtype

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({"numerics:batch_invariant"}))

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def run(
        self,
        layer: LayerSpec,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        plan: AttentionBatch,
        kv: KVStore,
    ) -> torch.Tensor:
        self.store(layer, k_TKH, v_TKH, plan, kv)
        out_TNH = torch.empty_like(q_TNH)
        for segment in plan.segments:
            for offset in range(segment.num_query):
                position, row = segment.num_context + offset, segment.query_start + offset
                slots = self.visible(layer, segment, position, plan)
                keys, values = kv.keys(layer.index)[slots], kv.values(layer.index)[slots]
                out_TNH[row] = self.attend(layer, q_TNH[row], keys, values, len(plan.segments))
        return out_TNH

    def store(
        self, layer: LayerSpec, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: AttentionBatch, kv: KVStore
    ) -> None:
        kv.keys(layer.index)[plan.slots_T] = k_TKH
        kv.values(layer.index)[plan.slots_T] = v_TKH

    def visible(self, layer: LayerSpec, segment: Any, position: int, plan: AttentionBatch) -> list[int]:
        first = 0 if layer.window is None else max(0, position - layer.window + 1)
        size = plan.block_size
        return [segment.block_table[p // size] * size + p % size for p in range(first, position + 1)]

    def attend(
        self, layer: LayerSpec, q_NH: torch.Tensor, k_CKH: torch.Tensor, v_CKH: torch.Tensor, num_segments: int
    ) -> torch.Tensor:
        group = layer.num_heads // layer.num_kv_heads
        k_CNH, v_CNH = (one.float().repeat_interleave(group, dim=1) for one in (k_CKH, v_CKH))
        scores_CN = (k_CNH * q_NH.float()).sum(-1) * layer.scale
        if layer.soft_cap is not None:
            scores_CN = layer.soft_cap * torch.tanh(scores_CN / layer.soft_cap)
        return (torch.softmax(scores_CN, 0)[:, :, None] * v_CNH).sum(0).to(q_NH.dtype)


def sees(change: Any) -> type[LoopAttention]:
    """LoopAttention whose rows see other slots: change(slots, layer, segment, position, plan) -> slots."""

    class Broken(LoopAttention):
        def visible(self, layer: LayerSpec, segment: Any, position: int, plan: AttentionBatch) -> list[int]:
            slots = super().visible(layer, segment, position, plan)
            return list(change(slots, layer, segment, position, plan))

    return Broken


def attends(**changes: Any) -> type[LoopAttention]:
    """LoopAttention whose layers of a certain shape are computed as if they had another one."""
    when, then = changes["when"], changes["then"]

    class Broken(LoopAttention):
        def attend(self, layer: LayerSpec, q_NH: Any, k_CKH: Any, v_CKH: Any, num_segments: int) -> torch.Tensor:
            if not when(layer):
                return super().attend(layer, q_NH, k_CKH, v_CKH, num_segments)
            return torch.as_tensor(then(super().attend, layer, q_NH, k_CKH, v_CKH, num_segments))

    return Broken


def stores(write: Any) -> type[LoopAttention]:
    """LoopAttention that does something else to the store after its own writes."""

    class Broken(LoopAttention):
        def run(self, layer: LayerSpec, q: Any, k: Any, v: Any, plan: AttentionBatch, kv: KVStore) -> torch.Tensor:
            out = super().run(layer, q, k, v, plan, kv)
            write(self, layer, q, k, v, plan, kv)
            return out

    return Broken


def only_here(length: int, context: int, num_segments: int = 1) -> Any:
    """A trigger: a segment of this many new and cached tokens."""
    return lambda segment, plan: (
        (segment.num_query, segment.num_context, len(plan.segments)) == (length, context, num_segments)
    )


def blind_to(trigger: Any) -> type[LoopAttention]:
    """Drops the first key of the rows that have several, where the trigger says so."""

    def change(slots: list[int], layer: Any, segment: Any, position: int, plan: Any) -> list[int]:
        return slots[1:] if trigger(segment, plan) and len(slots) > 1 else slots

    return sees(change)


def sees_the_future(slots: list[int], layer: Any, segment: Any, position: int, plan: Any) -> list[int]:
    ahead = segment.num_query == 11 and position < 10
    return [*slots, slots[-1] + 1] if ahead else slots


def ignores_the_table(slots: list[int], layer: Any, segment: Any, position: int, plan: Any) -> list[int]:
    sorted_table = tuple(sorted(segment.block_table)) == segment.block_table
    many = len(segment.block_table) > 1 and len(plan.segments) == 1
    return slots if sorted_table or not many else sorted(slots)[:1] * len(slots)


def window_off_by_one(slots: list[int], layer: LayerSpec, *_: Any) -> list[int]:
    return slots if layer.window is None or len(slots) < layer.window else slots[1:]


def reads_the_whole_block(slots: list[int], layer: Any, segment: Any, position: int, plan: Any) -> list[int]:
    one_block = len(plan.segments) == 1 and (segment.num_context, segment.num_query) == (2, 3)
    return [*slots, segment.block_table[0] * plan.block_size + plan.block_size - 1] if one_block else slots


class HalfScores(LoopAttention):
    def attend(self, layer: LayerSpec, q_NH: Any, k_CKH: Any, v_CKH: Any, num_segments: int) -> torch.Tensor:
        if q_NH.dtype == torch.float32:
            return super().attend(layer, q_NH, k_CKH, v_CKH, num_segments)
        scores_CN = (k_CKH * q_NH).sum(-1) * layer.scale if layer.num_heads == layer.num_kv_heads else None
        if scores_CN is None:
            return super().attend(layer, q_NH, k_CKH, v_CKH, num_segments)
        return (torch.softmax(scores_CN, 0)[:, :, None] * v_CKH).sum(0)


class Float32Output(LoopAttention):
    def run(self, layer: LayerSpec, *rest: Any) -> torch.Tensor:
        return super().run(layer, *rest).float()


class ForgetsValues(LoopAttention):
    def run(self, layer: LayerSpec, q: Any, k: Any, v: Any, plan: AttentionBatch, kv: KVStore) -> torch.Tensor:
        out = super().run(layer, q, k, v, plan, kv)
        kv.values(layer.index)[plan.slots_T[-1]] = 0
        return out


class PlansOnce(LoopAttention):
    """Forgets which layer it serves when a plan is used a second time."""

    def run(self, layer: LayerSpec, q: Any, k: Any, v: Any, plan: AttentionBatch, kv: KVStore) -> torch.Tensor:
        out = super().run(layer, q, k, v, plan, kv)
        return out if layer.index == 0 else out + 1


def marks_layer_one(self: Any, layer: LayerSpec, q: Any, k: Any, v: Any, plan: Any, kv: KVStore) -> None:
    if len(plan.segments) == 2:
        kv.values(1)[0] = 0


def scales_q_in_place(self: Any, layer: LayerSpec, q: Any, k: Any, v: Any, plan: Any, kv: KVStore) -> None:
    q.mul_(layer.scale)


def unsafe_softmax(base: Any, layer: LayerSpec, q_NH: Any, k_CKH: Any, v_CKH: Any, num_segments: int) -> Any:
    weights_CN = torch.exp((k_CKH * q_NH).sum(-1))
    return ((weights_CN / weights_CN.sum(0))[:, :, None] * v_CKH).sum(0)


def with_layer(**changes: Any) -> Any:
    """Computes as if the layer had other numbers."""
    from dataclasses import replace

    return lambda base, layer, *rest: base(replace(layer, **changes), *rest)


def interleaved_heads(base: Any, layer: LayerSpec, q_NH: Any, k_CKH: Any, v_CKH: Any, num_segments: int) -> Any:
    heads = [n % layer.num_kv_heads for n in range(layer.num_heads)]
    shape = {"num_kv_heads": layer.num_heads}
    return with_layer(**shape)(base, layer, q_NH, k_CKH[:, heads], v_CKH[:, heads], num_segments)


class RoundsByBatch(LoopAttention):
    """Other bits in a batch of five segments, well inside the tolerance."""

    def attend(self, layer: LayerSpec, q_NH: Any, k_CKH: Any, v_CKH: Any, num_segments: int) -> torch.Tensor:
        out = super().attend(layer, q_NH, k_CKH, v_CKH, num_segments)
        return out * (1 + 2**-22) if num_segments == 5 else out


class RoundsByChunk(LoopAttention):
    """Other bits in a chunk that is not the first and not a single token, well inside the tolerance."""

    def run(self, layer: LayerSpec, q: Any, k: Any, v: Any, plan: AttentionBatch, kv: KVStore) -> torch.Tensor:
        out = super().run(layer, q, k, v, plan, kv)
        chunk = len(plan.segments) == 1 and plan.segments[0].num_query == 16 and plan.segments[0].num_context > 0
        return out * (1 + 2**-22) if chunk else out


BROKEN: dict[str, type[LoopAttention]] = {
    "is_causal": sees(sees_the_future),
    "reads_the_cached_prefix": blind_to(only_here(5, 9)),
    "decodes_one_token": blind_to(only_here(1, 13)),
    "mixes_segments_in_a_batch": blind_to(lambda segment, plan: len(plan.segments) == 4 and segment.sequence_id > 0),
    "follows_the_block_table": sees(ignores_the_table),
    "query_heads_share_kv_heads": attends(
        when=lambda layer: layer.num_kv_heads == 2 and layer.num_heads == 6, then=interleaved_heads
    ),
    "all_query_heads_may_share_one": attends(
        when=lambda layer: layer.num_kv_heads == 1, then=lambda base, *rest: base(*rest).flip(0)
    ),
    "window_limits_the_keys": sees(window_off_by_one),
    "any_head_dim_works": attends(
        when=lambda layer: layer.head_dim == 80,
        then=lambda base, layer, q, k, v, n: base(layer, q, k[..., :64].repeat(1, 1, 2)[..., :80], v, n),
    ),
    "scale_is_the_layers": attends(when=lambda layer: layer.scale == 0.9, then=with_layer(scale=8**-0.5)),
    "large_scores_do_not_overflow": attends(
        when=lambda layer: layer.scale == 1.0 and layer.soft_cap is None, then=unsafe_softmax
    ),
    "soft_cap_is_honoured_or_refused": attends(when=lambda layer: layer.soft_cap, then=with_layer(soft_cap=None)),
    "half_precision_scores_are_float32": HalfScores,
    "output_has_the_queries_shape_and_dtype": Float32Output,
    "new_keys_and_values_are_stored": ForgetsValues,
    "nothing_else_is_written": stores(marks_layer_one),
    "stale_slots_are_never_read": sees(reads_the_whole_block),
    "inputs_are_not_changed": stores(scales_q_in_place),
    "one_plan_serves_every_layer": PlansOnce,
    "rows_are_bitwise_independent": RoundsByBatch,
    "chunks_are_bitwise_invariant": RoundsByChunk,
}


def test_a_plain_loop_passes() -> None:
    report = run_checks(attention_checks(LoopAttention))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in attention_checks(LoopAttention)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_attention_fails_exactly_its_check(name: str) -> None:
    report = run_checks(attention_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)


def test_bitwise_checks_are_made_only_when_declared() -> None:
    class Undeclared(LoopAttention):
        @classmethod
        def capabilities(cls, config: Any) -> Capabilities:
            return Capabilities()

    names = {check.name for check in attention_checks(Undeclared)}
    assert names == (COMMON | set(BROKEN)) - {"rows_are_bitwise_independent", "chunks_are_bitwise_invariant"}
