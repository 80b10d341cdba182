"""The attention kit's checks of KV formats: a plain loop passes, and for every check a broken one fails exactly it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.component import KV_FORMATS, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.testing.attention import attention_checks
from pluglm.testing.attention_formats import FORMAT_CHECKS, attention_format_checks
from pluglm.testing.check import run_checks
from pluglm.testing.context import make_context

NAMES = {function.__name__ for function in FORMAT_CHECKS}


class DecodingLoop:
    """Row by row over all keys of a segment that the format gives back."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.kv_format: Any = context.kv_format

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({KV_FORMATS}))

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def run(self, layer: LayerSpec, q_TNH: Any, k_TKH: Any, v_TKH: Any, plan: AttentionBatch, kv: Any) -> torch.Tensor:
        parts = kv.parts(layer.index)
        self.store(parts, plan.slots_T, k_TKH, v_TKH)
        out_TNH = torch.empty_like(q_TNH)
        for segment in plan.segments:
            slots = segment.slots(plan.block_size)
            k_SKH, v_SKH = (self.read(parts[one][slots], parts[one + 2][slots]) for one in (0, 1))
            for offset in range(segment.num_query):
                row, last = segment.query_start + offset, segment.num_context + offset + 1
                first = 0 if layer.window is None else max(0, last - layer.window)
                out_TNH[row] = self.attend(layer, q_TNH[row], k_SKH[first:last], v_SKH[first:last])
        return out_TNH

    def store(self, parts: tuple[torch.Tensor, ...], slots_T: torch.Tensor, *both: torch.Tensor) -> None:
        for one, x_TKH in enumerate(both):
            parts[one][slots_T], parts[one + 2][slots_T] = self.kv_format.encode(x_TKH)

    def read(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        x_SKH: torch.Tensor = self.kv_format.decode(codes, scales)
        return x_SKH

    def attend(self, layer: LayerSpec, q_NH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor) -> torch.Tensor:
        group = layer.num_heads // layer.num_kv_heads
        k_SNH, v_SNH = (x.repeat_interleave(group, dim=1) for x in (k_SKH, v_SKH))
        weights_SN = torch.softmax((k_SNH * q_NH).sum(-1) * layer.scale, 0)
        return (weights_SN.unsqueeze(-1) * v_SNH).sum(0)


class ForgetsHalfTheScales(DecodingLoop):
    def read(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return super().read(codes, scales[..., :1].expand_as(scales))


class StoresOldScales(DecodingLoop):
    """Reads are of what is right, and then the scales are those of before."""

    def run(self, layer: LayerSpec, q_TNH: Any, k_TKH: Any, v_TKH: Any, plan: AttentionBatch, kv: Any) -> torch.Tensor:
        scales = kv.parts(layer.index)[3]
        before = scales.clone()
        out_TNH = super().run(layer, q_TNH, k_TKH, v_TKH, plan, kv)
        scales.copy_(before)
        return out_TNH


class ClearsTheFirstSlot(DecodingLoop):
    """Once everything is read."""

    def run(self, layer: LayerSpec, q_TNH: Any, k_TKH: Any, v_TKH: Any, plan: AttentionBatch, kv: Any) -> torch.Tensor:
        out_TNH = super().run(layer, q_TNH, k_TKH, v_TKH, plan, kv)
        free = set(range(len(kv.keys(0)))) - set(plan.slots_T.tolist())
        kv.parts(1)[2][min(free)] = 0
        return out_TNH


BROKEN: dict[str, type[DecodingLoop]] = {
    "reads_what_codes_stand_for": ForgetsHalfTheScales,
    "stores_what_the_format_encodes": StoresOldScales,
    "no_other_codes_are_written": ClearsTheFirstSlot,
}


def checks(cls: type[DecodingLoop]) -> Any:
    def build(layer: LayerSpec, kv_format: KVFormat) -> Any:
        return cls(ComponentConfig(), replace(make_context(), kv_format=kv_format))

    return attention_format_checks(build, "cpu", 2e-5)


def test_a_loop_that_decodes_passes() -> None:
    report = run_checks(checks(DecodingLoop))
    assert report.ok, str(report)


def test_who_refuses_the_format_passes() -> None:
    class Refuses(DecodingLoop):
        def __init__(self, config: ComponentConfig, context: Any) -> None:
            raise IncompatibleError("another format, please")

    assert run_checks(checks(Refuses)).ok


def test_only_who_reads_formats_is_checked_for_them() -> None:
    class Plain(DecodingLoop):
        @classmethod
        def capabilities(cls, config: Any) -> Capabilities:
            return Capabilities()

    assert {check.name for check in attention_checks(DecodingLoop)} >= NAMES
    assert not {check.name for check in attention_checks(Plain)} & NAMES


def test_every_check_has_a_broken_fixture() -> None:
    assert set(BROKEN) == NAMES


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_attention_fails_exactly_its_check(name: str) -> None:
    report = run_checks(checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
