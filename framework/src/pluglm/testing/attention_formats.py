"""The part of the attention kit about KV formats: codes are written as the format makes them, and read for what they
stand for. The format is one that no kernel knows; an attention that cannot read it refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from pluglm.kernel.errors import PluglmError
from pluglm.kernel.interfaces.attention import Attention
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.kv_format import PART_NAMES, KVFormat
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.testing.attention_cases import STALE, Case, Text, batch_of, make_case, new_rows, reference
from pluglm.testing.batches import slots_at
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.context import small_spec
from pluglm.testing.kv_formats import EncodedStore, NibbleKV

# S: tokens of one sequence, T: tokens of the flat batch, K: kv heads, H: head dim

LENGTHS = [(9, 5), (0, 6), (13, 1), (4, 2)]
LAYER = LayerSpec(index=0, num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5)
Build = Callable[[LayerSpec, KVFormat], Attention]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSubject:
    """build: a fresh object for a layer and a format. tolerance: as that of attention_checks."""

    build: Build
    kv_format: KVFormat
    device: str
    tolerance: float

    def run(self, case: Case) -> tuple[torch.Tensor, EncodedStore] | None:
        """(out_TNH, what is stored then), on the CPU; None when the attention refuses the format."""
        try:
            attention = self.build(case.layer, self.kv_format)
        except PluglmError:
            return None
        store = encoded_store(case, self.kv_format, self.device)
        with torch.inference_mode():
            plan = attention.plan(batch_of(case, self.device))
            return attention.run(case.layer, *new_rows(case, self.device), plan, store).cpu(), store


def attention_format_checks(build: Build, device: str, tolerance: float) -> Iterator[Check]:
    """Every check of an attention that provides attention:kv_formats."""
    kv_format = NibbleKV(ComponentConfig(), device, torch.float32)
    subject = FormatSubject(build=build, kv_format=kv_format, device=device, tolerance=tolerance)
    for function in FORMAT_CHECKS:
        yield make_check(function, subject)


def encoded_store(case: Case, kv_format: KVFormat, device: str) -> EncodedStore:
    """As fresh_store, in a format."""
    layout = KVLayout(num_blocks=len(case.blocks), block_size=case.block_size)
    store = EncodedStore(layout, _spec_of(case.layer), kv_format, device, fill=STALE)
    for text, segment in zip(case.texts, case.segments(), strict=True):
        slots = slots_at(segment.block_table, range(segment.num_context), case.block_size)
        store.write(case.layer.index, slots, *(x[: segment.num_context] for x in (text.k_SKH, text.v_SKH)))
    return store


def decoded(case: Case, kv_format: KVFormat) -> Case:
    """The case with the keys and values that the stored ones stand for."""

    def read(x_SKH: torch.Tensor) -> torch.Tensor:
        return kv_format.decode(*kv_format.encode(x_SKH))

    texts = tuple(Text(q_SNH=one.q_SNH, k_SKH=read(one.k_SKH), v_SKH=read(one.v_SKH)) for one in case.texts)
    return replace(case, texts=texts)


def _spec_of(layer: LayerSpec) -> ModelSpec:
    return replace(small_spec(), layers=(replace(layer, index=0), replace(layer, index=1)))


def reads_what_codes_stand_for(subject: FormatSubject) -> None:
    """Of prompts, cached prefixes and single tokens, with and without a window; rows of the step's own tokens too."""
    for layer in (LAYER, replace(LAYER, window=5)):
        for block_size, is_shuffled in ((16, False), (4, True)):
            case = make_case(layer, LENGTHS, block_size=block_size, shuffled=is_shuffled)
            if (found := subject.run(case)) is None:
                return
            error = (found[0].double() - reference(decoded(case, subject.kv_format))).abs().nan_to_num(nan=float("inf"))
            worst = float(error.max())
            expect(worst <= subject.tolerance, f"the decoded keys' float64 result within {subject.tolerance:g}", worst)


def stores_what_the_format_encodes(subject: FormatSubject) -> None:
    case = make_case(LAYER, LENGTHS, shuffled=True)
    if (found := subject.run(case)) is None:
        return
    slots_T = batch_of(case, subject.device).slots_T
    _, k_TKH, v_TKH = new_rows(case, subject.device)
    (keys, key_scales), (values, value_scales) = (subject.kv_format.encode(x) for x in (k_TKH, v_TKH))
    parts = zip(PART_NAMES, found[1].parts(0), (keys, values, key_scales, value_scales), strict=True)
    for name, part, expected in parts:
        expect(torch.equal(part[slots_T], expected), f"{name} of the new tokens as encode gives them", part[slots_T])


def no_other_codes_are_written(subject: FormatSubject) -> None:
    case = make_case(LAYER, LENGTHS, shuffled=True)
    if (found := subject.run(case)) is None:
        return
    before = encoded_store(case, subject.kv_format, subject.device)
    slots_T = batch_of(case, subject.device).slots_T
    for layer in (0, 1):
        for name, part, old in zip(PART_NAMES, found[1].parts(layer), before.parts(layer), strict=True):
            changed = (part != old).flatten(1).any(1)
            if layer == 0:
                changed[slots_T] = False
            slots = changed.nonzero().flatten().tolist()
            expect(not slots, f"{name} of layer {layer} unchanged outside the plan's slots", f"writes to slots {slots}")


FORMAT_CHECKS: tuple[Callable[[FormatSubject], None], ...] = (
    reads_what_codes_stand_for,
    stores_what_the_format_encodes,
    no_other_codes_are_written,
)
