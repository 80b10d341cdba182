"""The contract kit of attention: the definition in float64, the writes to the store, and declared bitwise promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from pluglm.kernel.errors import PluglmError
from pluglm.kernel.interfaces.attention import Attention, GraphAttention
from pluglm.kernel.interfaces.component import BATCH_INVARIANT, KV_FORMATS
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.testing.attention_cases import (
    STALE,
    Case,
    batch_of,
    fresh_store,
    make_case,
    new_rows,
    random_text,
    reference,
    run_case,
)
from pluglm.testing.attention_formats import attention_format_checks
from pluglm.testing.attention_graphs import attention_graph_checks
from pluglm.testing.check import Check, ContractViolation, expect, make_check
from pluglm.testing.common import common_checks, provides
from pluglm.testing.context import make_context, small_spec

# T: tokens of the flat batch, N: query heads, K: kv heads, H: head dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The class under test and where it runs. build: a fresh object for a layer shape, deterministic or not."""

    cls: type[Any]
    config: Any
    device: str
    tolerance: float

    def build(self, layer: LayerSpec, dtype: str = "float32", deterministic: bool = False) -> Attention:
        context = make_context(
            spec=spec_of(layer), device=self.device, dtype=dtype, deterministic=deterministic, max_model_len=512
        )
        attention: Attention = self.cls(self.config, context)
        return attention

    def makes_graph_plans(self) -> bool:
        """By an object, as whether it can may follow from its config. One that cannot be built fails other checks."""
        try:
            return isinstance(self.build(plain_layer()), GraphAttention)
        except Exception:
            return False

    def build_for(self, layer: LayerSpec, kv_format: KVFormat) -> Attention:
        context = make_context(spec=spec_of(layer), device=self.device, kv_format=kv_format, max_model_len=512)
        attention: Attention = self.cls(self.config, context)
        return attention

    def run(self, case: Case, deterministic: bool = False) -> torch.Tensor:
        attention = self.build(case.layer, deterministic=deterministic)
        return run_case(attention, case, fresh_store(case, spec_of(case.layer), self.device), self.device)

    def compare(self, case: Case) -> None:
        expect_close(self.run(case), reference(case), self.tolerance)


def attention_checks(
    cls: type[Any], config: Any = None, *, device: str = "cpu", tolerance: float = 2e-5
) -> Iterator[Check]:
    """Every check of an attention class. tolerance: largest absolute error in float32, for values of size 1."""
    config = cls.Config() if config is None else config
    subject = Subject(cls=cls, config=config, device=device, tolerance=tolerance)
    yield from common_checks("attention", cls, config, lambda: subject.build(plain_layer()))
    for function in ALWAYS:
        yield make_check(function, subject)
    if provides(cls, config, BATCH_INVARIANT):
        yield make_check(rows_are_bitwise_independent, subject)
        yield make_check(chunks_are_bitwise_invariant, subject)
    if provides(cls, config, KV_FORMATS):
        yield from attention_format_checks(subject.build_for, device, tolerance)
    if subject.makes_graph_plans():
        yield from attention_graph_checks(subject.build, device, tolerance)


def plain_layer(**changes: Any) -> LayerSpec:
    """As many kv heads as query heads, no window, no soft cap, unless changed."""
    shape: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "scale": 8**-0.5}
    return LayerSpec(index=0, **{**shape, **changes})


def spec_of(layer: LayerSpec) -> ModelSpec:
    """A model of two layers like this one."""
    return replace(small_spec(), layers=(replace(layer, index=0), replace(layer, index=1)))


def expect_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (found.double() - expected).abs()
    worst = float(error.nan_to_num(nan=float("inf")).max())
    row = int(error.nan_to_num(nan=float("inf")).flatten(1).max(1).values.argmax())
    expect(worst <= tolerance, f"the float64 reference within {tolerance:g}", f"an error of {worst:.3g} in row {row}")


def is_causal(subject: Subject) -> None:
    subject.compare(make_case(plain_layer(), [(0, 11)], block_size=16))


def reads_the_cached_prefix(subject: Subject) -> None:
    subject.compare(make_case(plain_layer(), [(9, 5)], block_size=16))


def decodes_one_token(subject: Subject) -> None:
    subject.compare(make_case(plain_layer(), [(13, 1)], block_size=16))


def mixes_segments_in_a_batch(subject: Subject) -> None:
    subject.compare(make_case(plain_layer(), [(0, 6), (7, 1), (5, 4), (0, 1)], block_size=16))


def follows_the_block_table(subject: Subject) -> None:
    subject.compare(make_case(plain_layer(), [(14, 3)], shuffled=True))


def query_heads_share_kv_heads(subject: Subject) -> None:
    subject.compare(make_case(plain_layer(num_heads=6, num_kv_heads=2), [(0, 7)], block_size=16))


def all_query_heads_may_share_one(subject: Subject) -> None:
    subject.compare(make_case(plain_layer(num_heads=4, num_kv_heads=1), [(0, 7)], block_size=16))


def window_limits_the_keys(subject: Subject) -> None:
    subject.compare(make_case(plain_layer(window=5), [(6, 6)], block_size=16))


def any_head_dim_works(subject: Subject) -> None:
    for head_dim in (4, 64, 80):
        subject.compare(make_case(plain_layer(head_dim=head_dim, scale=head_dim**-0.5), [(0, 5)], block_size=16))


def scale_is_the_layers(subject: Subject) -> None:
    subject.compare(make_case(plain_layer(scale=0.9), [(0, 6)], block_size=16))


def large_scores_do_not_overflow(subject: Subject) -> None:
    """Scores of several hundred: float32 exp overflows at 88, so the maximum has to be taken off first."""
    layer = plain_layer(scale=1.0)
    case = make_case(layer, [(0, 6)], block_size=16, size=12.0)
    expect_close(subject.run(case), reference(case), 2e-3)  # float32 scores of this size round by 3e-5 each


def soft_cap_is_honoured_or_refused(subject: Subject) -> None:
    layer = plain_layer(soft_cap=0.7, scale=1.0)
    try:
        subject.build(layer)
    except PluglmError:
        return
    subject.compare(make_case(layer, [(0, 6)], block_size=16))


def half_precision_scores_are_float32(subject: Subject) -> None:
    """bfloat16 inputs with scores of about 30, which bfloat16 itself would round by up to 0.06."""
    case = make_case(plain_layer(scale=0.5), [(0, 24)], block_size=32, dtype=torch.bfloat16, size=3.1)
    attention = subject.build(case.layer, "bfloat16")
    found = run_case(attention, case, fresh_store(case, spec_of(case.layer), subject.device), subject.device)
    expect_close(found, reference(case), 0.02)  # bfloat16 weights and outputs of size 2 round by 2^-8 each


def output_has_the_queries_shape_and_dtype(subject: Subject) -> None:
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        case = make_case(plain_layer(num_heads=4), [(2, 3), (0, 2)], block_size=8, dtype=dtype)
        store = fresh_store(case, spec_of(case.layer), subject.device)
        found = run_case(subject.build(case.layer, name), case, store, subject.device)
        expect(found.shape == (5, 4, 8), "shape (5, 4, 8), that of q_TNH", tuple(found.shape))
        expect(found.dtype == dtype, f"q's dtype {dtype}", found.dtype)


def new_keys_and_values_are_stored(subject: Subject) -> None:
    case = make_case(plain_layer(), [(3, 4), (0, 2)], shuffled=True)
    store = fresh_store(case, spec_of(case.layer), subject.device)
    run_case(subject.build(case.layer), case, store, subject.device)
    slots_T = batch_of(case, subject.device).slots_T
    _, k_TKH, v_TKH = new_rows(case, subject.device)
    expect(torch.equal(store.keys(0)[slots_T], k_TKH), "k at the plan's slots", store.keys(0)[slots_T])
    expect(torch.equal(store.values(0)[slots_T], v_TKH), "v at the plan's slots", store.values(0)[slots_T])


def nothing_else_is_written(subject: Subject) -> None:
    case = make_case(plain_layer(), [(3, 4), (0, 2)], shuffled=True)
    store = fresh_store(case, spec_of(case.layer), subject.device)
    before = fresh_store(case, spec_of(case.layer), subject.device)
    run_case(subject.build(case.layer), case, store, subject.device)
    slots_T = batch_of(case, subject.device).slots_T
    for name, layer in (("keys", 0), ("values", 0), ("keys", 1), ("values", 1)):
        changed = (getattr(store, name)(layer) != getattr(before, name)(layer)).flatten(1).any(1)
        if layer == 0:
            changed[slots_T] = False
        slots = changed.nonzero().flatten().tolist()
        expect(not slots, f"{name} of layer {layer} unchanged outside the plan's slots", f"writes to slots {slots}")


def stale_slots_are_never_read(subject: Subject) -> None:
    """What other sequences left in a block's unused slots has no influence."""
    case = make_case(plain_layer(), [(2, 3)], block_size=16)
    store = fresh_store(case, spec_of(case.layer), subject.device)
    first = run_case(subject.build(case.layer), case, store, subject.device)
    other = fresh_store(case, spec_of(case.layer), subject.device)
    for tensor in (other.keys(0), other.values(0)):
        tensor[tensor == STALE] = -5 * STALE
    second = run_case(subject.build(case.layer), case, other, subject.device)
    expect(torch.equal(first, second), "the same output whatever unused slots hold", (first - second).abs().max())


def inputs_are_not_changed(subject: Subject) -> None:
    case = make_case(plain_layer(), [(2, 4)], block_size=16)
    store = fresh_store(case, spec_of(case.layer), subject.device)
    attention, batch = subject.build(case.layer), batch_of(case, subject.device)
    rows = new_rows(case, subject.device)
    with torch.inference_mode():
        attention.run(case.layer, *rows, attention.plan(batch), store)
    for name, now, before in zip(("q", "k", "v"), rows, new_rows(case, subject.device), strict=True):
        expect(torch.equal(now, before), f"{name} as it was given", "other values")
    expect(torch.equal(batch.slots_T, batch_of(case, subject.device).slots_T), "slots_T as given", batch.slots_T)


def one_plan_serves_every_layer(subject: Subject) -> None:
    case = make_case(plain_layer(), [(4, 3)], block_size=16)
    attention, store = subject.build(case.layer), fresh_store(case, spec_of(case.layer), subject.device)
    second = replace(case, layer=replace(case.layer, index=1), texts=(random_text(case.layer, 7, seed=99),))
    cached = fresh_store(second, spec_of(case.layer), subject.device)
    store.keys(1).copy_(cached.keys(1))
    store.values(1).copy_(cached.values(1))
    with torch.inference_mode():
        plan = attention.plan(batch_of(case, subject.device))
        outputs = [
            attention.run(one.layer, *new_rows(one, subject.device), plan, store).cpu() for one in (case, second)
        ]
    for one, found in zip((case, second), outputs, strict=True):
        expect_close(found, reference(one), subject.tolerance)


def rows_are_bitwise_independent(subject: Subject) -> None:
    """A sequence gives the same bits alone and among any others."""
    layer, lengths = plain_layer(num_heads=4), [(9, 1), (0, 8), (21, 1), (6, 5), (0, 1)]
    together = subject.run(make_case(layer, lengths, shuffled=True), deterministic=True)
    start = 0
    for seed, (cached, new) in enumerate(lengths):
        text = random_text(layer, cached + new, seed)
        alone = replace(make_case(layer, [(cached, new)]), texts=(text,))
        found = subject.run(alone, deterministic=True)
        same = torch.equal(found, together[start : start + new])
        expect(same, f"the bits of sequence {seed} alone", f"others in a batch of {len(lengths)}")
        start += new


def chunks_are_bitwise_invariant(subject: Subject) -> None:
    """However a prompt is cut, its rows have the same bits."""
    layer, length = plain_layer(num_heads=4), 23
    whole = subject.run(make_case(layer, [(0, length)]), deterministic=True)
    text = random_text(layer, length, 0)
    for first, second in ((0, 5), (5, 6), (6, 22), (22, 23)):
        case = replace(make_case(layer, [(first, second - first)]), texts=(text,))
        found = subject.run(case, deterministic=True)
        if not torch.equal(found, whole[first:second]):
            raise ContractViolation(f"expected the bits of the whole prompt for rows {first} to {second}, found others")


ALWAYS: tuple[Callable[[Subject], None], ...] = (
    is_causal,
    reads_the_cached_prefix,
    decodes_one_token,
    mixes_segments_in_a_batch,
    follows_the_block_table,
    query_heads_share_kv_heads,
    all_query_heads_may_share_one,
    window_limits_the_keys,
    any_head_dim_works,
    scale_is_the_layers,
    large_scores_do_not_overflow,
    soft_cap_is_honoured_or_refused,
    half_precision_scores_are_float32,
    output_has_the_queries_shape_and_dtype,
    new_keys_and_values_are_stored,
    nothing_else_is_written,
    stale_slots_are_never_read,
    inputs_are_not_changed,
    one_plan_serves_every_layer,
)
