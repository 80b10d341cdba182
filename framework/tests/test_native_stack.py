"""All layers in one native call, and from ids to logits: the bits of the parts, and when it leaves it to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pluglm.backends.execute import StepAttention
from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.attention import AttentionBatch, HeadRows, NativeCalls
from pluglm.kernel.interfaces.kernels import KernelLog
from pluglm.kernel.interfaces.model import LayerParts, LayerSpec
from pluglm.native.attention import NativeAttention, NewKeys
from pluglm.native.fuser import NativeFuser
from pluglm.native.isa import LEVELS, missing
from pluglm.native.stack import NativeStack
from pluglm.native.tools import NativeTools

Tools = Callable[..., NativeTools]
RUNNABLE = [level.name for level in LEVELS if missing(level) is None]
NUM_LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER, BLOCK, CONTEXT = 3, 6, 2, 64, 96, 160, 16, 20
ROPES = (0, 1, 0)
VOCABULARIES, POSITIONS = (50, 64), 9  # the second has the shape for panels


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_parts(fuser: NativeFuser, dtype: torch.dtype, index: int, kv_heads: int = KV_HEADS) -> LayerParts:
    def linear(outputs: int, inputs: int, seed: int) -> Any:
        return fuser.make_linear("w", (random(outputs, inputs, seed=100 * index + seed) * inputs**-0.5).to(dtype), None)

    window = 7 if index == 1 else None
    return LayerParts(
        spec=LayerSpec(
            index=index, num_heads=HEADS, num_kv_heads=kv_heads, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5, window=window
        ),
        activation="silu",
        eps=1e-5,
        attention_norm=1.0 + 0.1 * random(WIDTH, seed=index),
        mlp_norm=1.0 + 0.1 * random(WIDTH, seed=index + 50),
        qkv=linear((HEADS + 2 * kv_heads) * HEAD_DIM, WIDTH, 1),
        output=linear(WIDTH, HEADS * HEAD_DIM, 2),
        gate_up=linear(2 * INNER, WIDTH, 3),
        down=linear(WIDTH, INNER, 4),
    )


class Store:
    """Keys and values of all layers, the same random ones every time."""

    def __init__(self, dtype: torch.dtype, num_blocks: int) -> None:
        shape = (num_blocks * BLOCK, KV_HEADS, HEAD_DIM)
        self.tensors = [
            (random(*shape, seed=7 + layer).to(dtype), random(*shape, seed=70 + layer).to(dtype))
            for layer in range(NUM_LAYERS)
        ]

    def keys(self, layer: int) -> torch.Tensor:
        return self.tensors[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        return self.tensors[layer][1]


class Attending:
    """An attention on the native kernel; offers: whether it has calls to offer."""

    def __init__(self, tools: NativeTools, offers: bool) -> None:
        self._native = NativeAttention(tools)
        if offers:
            self.native_calls = self._calls

    def plan(self, batch: AttentionBatch) -> Any:
        return self._native.plan(batch.segments, batch.block_size), batch.slots_T

    def run(self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, kv: Any) -> Any:
        new = NewKeys(k, v, plan[1])
        return self._native.attend(layer, q, plan[0], kv.keys(layer.index), kv.values(layer.index), new)

    def _calls(self, layers: Sequence[LayerSpec], heads: HeadRows, plan: Any, kv: Any) -> NativeCalls:
        new = NewKeys(heads.k_TKH, heads.v_TKH, plan[1])
        packed = [
            self._native.pack(one, heads.q_TNH, heads.out_TNH, plan[0], kv.keys(one.index), kv.values(one.index), new)
            for one in layers
        ]
        return NativeCalls(self._native.function, packed, plan)


def make_step(tools: NativeTools, dtype: torch.dtype, rows: int, offers: bool = True) -> tuple[StepAttention, Store]:
    """One new token of each of `rows` sequences."""
    blocks = CONTEXT // BLOCK + 1
    segments = tuple(
        Segment(
            sequence_id=i,
            query_start=i,
            num_query=1,
            num_context=CONTEXT - i % CONTEXT,
            block_table=tuple(range(i * blocks, (i + 1) * blocks)),
        )
        for i in range(rows)
    )
    slots = torch.tensor([slot for one in segments for slot in one.slots(BLOCK, one.num_context)])
    attention: Any = Attending(tools, offers)
    store: Any = Store(dtype, rows * blocks)
    plan = attention.plan(AttentionBatch(segments=segments, slots_T=slots, block_size=BLOCK))
    return StepAttention(attention, [plan], (), store), store


def make_prompt(tools: NativeTools, rows: int) -> tuple[StepAttention, Store]:
    """All tokens of one sequence, in bfloat16."""
    table = tuple(range(-(-rows // BLOCK)))
    segment = Segment(sequence_id=0, query_start=0, num_query=rows, num_context=0, block_table=table)
    attention: Any = Attending(tools, True)
    store: Any = Store(torch.bfloat16, len(table))
    plan = attention.plan(AttentionBatch(segments=(segment,), slots_T=torch.arange(rows), block_size=BLOCK))
    return StepAttention(attention, [plan], (), store), store


def one_by_one(
    layers: Sequence[Any], x: torch.Tensor, angles: list[torch.Tensor], attend: StepAttention
) -> torch.Tensor:
    for layer, rope in zip(layers, ROPES, strict=True):
        q, k, v = layer.pre_attention(x, *angles[2 * rope : 2 * rope + 2])
        x = layer.post_attention(x, attend(layer.spec, q, k, v))
    return x


def make_layers(tools: NativeTools, dtype: torch.dtype, log: KernelLog | None = None) -> tuple[NativeFuser, list[Any]]:
    fuser = NativeFuser(tools, log or KernelLog(), deterministic=False)
    return fuser, [fuser.layer(make_parts(fuser, dtype, index)) for index in range(NUM_LAYERS)]


@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_one_call_gives_the_bits_of_the_layers_one_by_one(
    native_tools: Tools, level: str, dtype: torch.dtype, rows: int
) -> None:
    tools = native_tools(level)
    fuser, layers = make_layers(tools, dtype)
    stack = fuser.stack(layers, ROPES)
    assert isinstance(stack, NativeStack)
    x = random(rows, WIDTH, seed=5).to(dtype)
    angles = [random(rows, 1, HEAD_DIM, seed=20 + i).to(dtype) for i in range(4)]
    (attend, stored), (plain, expected) = (make_step(tools, dtype, rows) for _ in range(2))
    before = x.clone()
    result = stack(x, angles, attend)
    assert result is not None
    assert torch.equal(result, one_by_one(layers, x, angles, plain))
    assert torch.equal(x, before)
    for ours, theirs in zip(stored.tensors, expected.tensors, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("level", [level for level in RUNNABLE if level == "avx512_bf16"])
def test_one_call_gives_the_bits_of_the_layers_one_by_one_for_a_prompt(native_tools: Tools, level: str) -> None:
    tools, rows = native_tools(level), 70
    fuser, layers = make_layers(tools, torch.bfloat16)
    stack = fuser.stack(layers, ROPES)
    assert stack is not None
    x = random(rows, WIDTH, seed=5).bfloat16()
    angles = [random(rows, 1, HEAD_DIM, seed=20 + i).bfloat16() for i in range(4)]
    (attend, stored), (plain, expected) = (make_prompt(tools, rows) for _ in range(2))
    result = stack(x, angles, attend)
    assert result is not None
    assert torch.equal(result, one_by_one(layers, x, angles, plain))
    for ours, theirs in zip(stored.tensors, expected.tensors, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_it_leaves_the_work_to_the_layers_where_it_cannot_do_it(native_tools: Tools) -> None:
    tools = native_tools(RUNNABLE[-1])
    fuser, layers = make_layers(tools, torch.float32)
    stack = fuser.stack(layers, ROPES)
    assert stack is not None
    angles = [random(1, 1, HEAD_DIM, seed=20 + i) for i in range(4)]
    attend, store = make_step(tools, torch.float32, 1, offers=False)
    stored = [one.clone() for pair in store.tensors for one in pair]
    x = random(1, WIDTH, seed=5)
    assert stack(x, angles, attend) is None
    assert stack(x, angles, lambda *parts: parts[1]) is None  # a bare function
    assert all(map(torch.equal, stored, [one for pair in store.tensors for one in pair]))
    most = layers[0].most_rows + 1
    many, _ = make_step(tools, torch.float32, 1)
    assert stack(random(most, WIDTH, seed=5), [one.expand(most, -1, -1) for one in angles], many) is None


def test_layers_of_several_shapes_or_makers_are_not_stacked_and_the_log_says_why(native_tools: Tools) -> None:
    tools, log = native_tools(RUNNABLE[-1]), KernelLog()
    fuser, layers = make_layers(tools, torch.float32, log)
    other = fuser.layer(make_parts(fuser, torch.float32, 3, kv_heads=3))
    assert other is not None
    assert fuser.stack([*layers, other], (*ROPES, 0)) is None
    foreign: Any = object()
    assert fuser.stack([*layers, foreign], (*ROPES, 0)) is None
    reasons = [reason for one in log.choices if one.operation == "all layers" for _, reason in one.refused]
    assert reasons == ["its layers have 2 shapes", "another fuser made some of its layers"]


def test_calls_for_another_number_of_layers_are_refused(native_tools: Tools) -> None:
    tools = native_tools(RUNNABLE[-1])
    fuser, layers = make_layers(tools, torch.float32)
    stack = fuser.stack(layers, ROPES)
    assert stack is not None

    class Short:
        def __call__(self, *parts: Any) -> Any: ...

        def native_calls(self, layers: Any, heads: Any) -> NativeCalls:
            return NativeCalls(1, [b"x"])

    with pytest.raises(ValueError, match="offers 1 calls for 3 layers"):
        stack(random(1, WIDTH, seed=5), [random(1, 1, HEAD_DIM, seed=i) for i in range(4)], Short())


def make_whole(tools: NativeTools, dtype: torch.dtype, vocabulary: int, tied: bool = True) -> tuple[Any, ...]:
    """Stack, head and step over an embedding, whose rows it returns too with the tables of two rotary embeddings."""
    fuser, layers = make_layers(tools, dtype)
    rows_VD = random(vocabulary, WIDTH, seed=40).to(dtype)
    embedding_VD, norm_D = fuser.placed(rows_VD), 1.0 + 0.1 * random(WIDTH, seed=41)
    other = fuser.make_linear("head", random(70, WIDTH, seed=46).to(dtype), None)
    head = fuser.tied_head(norm_D, 1e-5, embedding_VD) if tied else fuser.head(norm_D, 1e-5, other)
    stack = fuser.stack(layers, ROPES)
    assert stack is not None
    assert head is not None
    tables = [random(POSITIONS, 1, HEAD_DIM, seed=42 + i).to(dtype) for i in range(4)]
    return stack, head, fuser.step(None if tied else embedding_VD, stack, head), rows_VD, tables


@pytest.mark.parametrize("level", RUNNABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 70])
@pytest.mark.parametrize(("vocabulary", "tied"), [(VOCABULARIES[0], True), (VOCABULARIES[1], True), (50, False)])
def test_a_step_gives_the_bits_of_its_parts_call_after_call(
    native_tools: Tools, level: str, dtype: torch.dtype, rows: int, vocabulary: int, tied: bool
) -> None:
    """The room of a call is used again by the next one, and what the first one returned stays what it was."""
    tools = native_tools(level)
    stack, head, step, embedding_VD, tables = make_whole(tools, dtype, vocabulary, tied)
    got, wanted = [], []
    for seed in (0, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        ids_T, positions_T = (torch.randint(most, (rows,), generator=generator) for most in (vocabulary, POSITIONS))
        (attend, stored), (plain, expected) = (make_step(tools, dtype, rows) for _ in range(2))
        both = step(ids_T, positions_T, tables, attend)
        assert (both is None) == (rows > min(stack.most_rows, head.most_rows))
        if both is None:
            return
        got.append(both)
        hidden_TD = stack(embedding_VD[ids_T], [table[positions_T] for table in tables], plain)
        wanted.append((hidden_TD, head(hidden_TD)))
        for ours, theirs in zip(stored.tensors, expected.tensors, strict=True):
            assert all(map(torch.equal, ours, theirs))
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours[1].dtype == torch.float32
        assert all(map(torch.equal, ours, theirs))


def test_a_step_leaves_to_its_parts_what_it_cannot_do_and_refuses_rows_that_no_table_has(native_tools: Tools) -> None:
    tools = native_tools(RUNNABLE[-1])
    most_id = VOCABULARIES[0] - 1
    stack, head, step, _, tables = make_whole(tools, torch.float32, most_id + 1)
    ids_T, positions_T = torch.tensor([4, most_id]), torch.tensor([0, POSITIONS - 1])
    attend, _ = make_step(tools, torch.float32, 2)
    assert step(ids_T, positions_T, tables, attend) is not None
    assert step(ids_T, positions_T, tables, make_step(tools, torch.float32, 2, offers=False)[0]) is None
    most = min(stack.most_rows, head.most_rows) + 1
    many_T = torch.zeros(most, dtype=torch.int64)
    assert step(many_T, many_T, tables, make_step(tools, torch.float32, 1)[0]) is None
    for ids, positions in (([4, most_id + 1], [0, 1]), ([-1, 4], [0, 1]), ([4, 4], [0, POSITIONS]), ([4, 4], [-1, 0])):
        with pytest.raises(IndexError, match="a token id or a position is not among the rows of its table"):
            step(torch.tensor(ids), torch.tensor(positions), tables, attend)
    for wrong in (ids_T.int(), ids_T[:1], ids_T[:, None]):
        with pytest.raises(ValueError, match=r"takes \[2\] of torch.int64"):
            step(ids_T, wrong, tables, attend)
    with pytest.raises(ValueError, match=r"takes \[9, 1, 64\] of torch.float32"):
        step(ids_T, positions_T, [tables[0].double(), *tables[1:]], attend)


def test_a_step_is_made_of_parts_that_fit_and_the_log_says_why_not(native_tools: Tools) -> None:
    log = KernelLog()
    fuser, layers = make_layers(native_tools(RUNNABLE[-1]), torch.float32, log)
    stack, embedding_VD = fuser.stack(layers, ROPES), random(50, WIDTH, seed=40)
    assert stack is not None
    tied = fuser.tied_head(torch.ones(WIDTH), 1e-5, embedding_VD)
    head = fuser.head(torch.ones(WIDTH), 1e-5, fuser.make_linear("head", embedding_VD, None))
    foreign: Any = object()
    assert head is not None
    assert fuser.step(None, stack, tied) is not None
    assert fuser.step(embedding_VD, stack, head) is not None
    assert fuser.step(None, stack, head) is None
    assert fuser.step(embedding_VD.bfloat16(), stack, head) is None
    assert fuser.step(embedding_VD[:, 1:], stack, head) is None
    assert fuser.step(embedding_VD, foreign, head) is None
    assert fuser.step(embedding_VD, stack, foreign) is None
    choices = [one for one in log.choices if one.operation == "ids to logits"]
    assert {one.kernel for one in choices if not one.refused} == {"native (baseline), under native attention"}
    assert {reason for one in choices for _, reason in one.refused} == {
        "another fuser made its layers or its head",
        "its head took over no embedding, and there is no other",
        "its embedding, layers and head differ in dtype or width",
    }


def test_a_call_within_a_call_has_room_of_its_own(native_tools: Tools) -> None:
    """As when the engine gave up on a call, which still runs when the next one comes."""
    tools = native_tools(RUNNABLE[-1])
    fuser, layers = make_layers(tools, torch.float32)
    stack: Any = fuser.stack(layers, ROPES)
    x = random(1, WIDTH, seed=5)
    angles = [random(1, 1, HEAD_DIM, seed=20 + i) for i in range(4)]
    (outer, _), (inner, _), (plain, _) = (make_step(tools, torch.float32, 1) for _ in range(3))
    expected = one_by_one(layers, x, angles, plain)
    assert torch.equal(stack(x, angles, make_step(tools, torch.float32, 1)[0]), expected)  # leaves its room
    seen = []

    class Nested:
        def __call__(self, *parts: Any) -> Any: ...

        def native_calls(self, layers: Any, heads: HeadRows) -> Any:
            seen.append(stack(x, angles, Within()))
            return outer.native_calls(layers, heads)

    class Within(Nested):
        def native_calls(self, layers: Any, heads: HeadRows) -> Any:
            return inner.native_calls(layers, heads)

    assert torch.equal(stack(x, angles, Nested()), expected)
    assert torch.equal(seen[0], expected)


def test_plans_know_tables_again_and_lists_that_may_have_changed_not(native_tools: Tools) -> None:
    attention = NativeAttention(native_tools(RUNNABLE[-1]))

    def planned(*tables: Any) -> tuple[list[int], list[int], int]:
        segments = [
            Segment(sequence_id=i, query_start=i, num_query=1, num_context=7, block_table=one)
            for i, one in enumerate(tables)
        ]
        plan = attention.plan(segments, 8)
        return list(plan.segments), list(plan.block_tables), plan.num_slots

    first, second, changing = (3, 5), tuple(range(70)), [9]
    for _ in range(2):
        assert planned(first, second) == ([0, 1, 7, 0, 1, 1, 7, 2], [3, 5, *range(70)], 70 * 8)
    assert planned(second, changing, first) == ([0, 1, 7, 0, 1, 1, 7, 70, 2, 1, 7, 71], [*range(70), 9, 3, 5], 70 * 8)
    changing[0] = 100
    assert planned(changing, first) == ([0, 1, 7, 0, 1, 1, 7, 1], [100, 3, 5], 101 * 8)
    assert planned() == ([], [], 0)
