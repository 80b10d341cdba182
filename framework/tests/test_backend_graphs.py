"""Decode steps as graphs, on the CPU: recorded operations stand for what a GPU captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pluglm.arguments import silent
from pluglm.backends.graph_backend import GraphBackend
from pluglm.backends.graph_buckets import CAPTURED, REPLAYED, GraphDecision, bucket_of
from pluglm.backends.graphs import Captured, DecodeGraphs
from pluglm.backends.linear import DenseLinear
from pluglm.backends.rows import whole_rows
from pluglm.backends.scratch_store import MOST_SCRATCH_TOKENS, ScratchKVStore
from pluglm.backends.torch_backend import TorchBackend
from pluglm.kernel.core import Chunk, ModelInput
from pluglm.kernel.interfaces.attention import GraphAttention
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import KVGroup, KVLayout
from pluglm.kernel.runner import ModelRunner
from pluglm.models.llama import LlamaModel
from pluglm.testing.backend import backend_checks
from pluglm.testing.batches import Part, flat_input, grow
from pluglm.testing.block_kv import BlockPool
from pluglm.testing.check import Check, cases
from pluglm.testing.checkpoints import MemoryCheckpoint
from pluglm.testing.graph_attention import TableAttention, TablePlan
from pluglm.testing.graphs import NoWaits, RecordingTools
from pluglm.testing.tiny_model import CONFIG, LoopAttention, TinyModel, tiny_shapes

LAYOUT = KVLayout(num_blocks=24, block_size=4)
SIZES = (1, 2, 4)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def llama_shapes() -> dict[str, tuple[int, ...]]:
    layer = {
        "input_layernorm": (16,),
        "post_attention_layernorm": (16,),
        "self_attn.q_proj": (16, 16),
        "self_attn.k_proj": (8, 16),
        "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 16),
        "mlp.gate_proj": (24, 16),
        "mlp.up_proj": (24, 16),
        "mlp.down_proj": (16, 24),
    }
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,), **layers}


class RecordedBackend(GraphBackend):
    """A GraphBackend on the CPU. `tools` may be replaced before the first step."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: Any = None, context: Any = None, tools: Any = None) -> None:
        self.tools = tools or RecordingTools()
        super().__init__("cpu", torch.float32, DenseLinear, whole_rows, 1, DecodeGraphs(self.tools, SIZES, "cpu"))

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({"kv:layer_groups"}))

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def free_memory(self) -> int:
        return 1 << 30


class EagerBackend(TorchBackend):
    def __init__(self) -> None:
        super().__init__("cpu", torch.float32, DenseLinear, whole_rows, 1)

    free_memory, unavailable, capabilities = (
        RecordedBackend.free_memory,
        RecordedBackend.unavailable,
        RecordedBackend.capabilities,
    )


class Bench:
    """One model on a backend, with KV memory full of NaN: what is read before it was written shows."""

    def __init__(self, backend: Any, family: Any = TinyModel, attention: Any = None, layout: KVLayout = LAYOUT) -> None:
        self.backend, self.attention = backend, attention or TableAttention()
        checkpoint = MemoryCheckpoint(
            *((CONFIG, tiny_shapes(CONFIG)) if family is TinyModel else (LLAMA, llama_shapes()))
        )
        self.model = backend.load_model(family, checkpoint, None, silent)
        self.store = backend.allocate_kv(layout, self.model.spec)
        self.pool = BlockPool(layout.num_blocks, layout.block_size)
        for layer in range(2):
            whole = getattr(self.store, "whole", self.store)
            whole.keys(layer).fill_(torch.nan)
            whole.values(layer).fill_(torch.nan)

    def inputs(self, *parts: Part) -> ModelInput:
        for sequence_id, tokens, computed in parts:
            grow(self.pool, sequence_id, computed + len(tokens))
        return flat_input(parts, self.pool, all_rows=False)

    def step(self, *parts: Part) -> torch.Tensor:
        logits: torch.Tensor = self.backend.execute(self.model, self.inputs(*parts), self.attention, self.store)
        return logits

    def decision(self) -> GraphDecision:
        return self.backend.graphs.last  # type: ignore[no-any-return]


STEPS: list[list[Part]] = [
    [(1, [3, 1, 4, 1, 5], 0), (2, [9, 2], 0), (3, [6], 0)],
    [(1, [5], 5), (2, [3], 2), (3, [5], 1)],  # 3 rows in a graph of 4
    [(2, [8], 3)],
    [(3, [9], 2), (2, [7], 4)],  # another order, other rows
    [(1, [9], 6), (2, [3], 5), (3, [2], 3), (4, [3], 0)],  # full
    [(1, [8], 7), (3, [4], 4), (2, [6], 6)],  # fewer again: row 4 must not write
    [(3, [2], 5)],
]


@pytest.mark.parametrize("family", [TinyModel, LlamaModel])
def test_replayed_steps_equal_eager_ones(family: Any) -> None:
    """LoopAttention without padding is the authority; steps of 1, 2, 3 and 4 rows after a prompt step."""
    graphs, eager = Bench(RecordedBackend(), family), Bench(EagerBackend(), family, LoopAttention())
    decisions = []
    for parts in STEPS:
        torch.testing.assert_close(graphs.step(*parts), eager.step(*parts), rtol=0, atol=2e-5)
        decisions.append((graphs.decision().bucket, graphs.decision().reason))
    prompt, *rest = decisions
    assert prompt == (None, "a sequence computes several tokens")
    assert rest == [(4, CAPTURED), (1, CAPTURED), (2, CAPTURED), (4, REPLAYED), (4, REPLAYED), (1, REPLAYED)]
    assert (graphs.backend.tools.num_captures, graphs.backend.tools.num_replays) == (3, 6)
    assert graphs.backend.graphs.counts[GraphDecision(REPLAYED, 4)] == 2
    assert graphs.backend.graphs.counts.total() == len(STEPS)
    for layer in range(2):  # all memory that the run knows of, NaN where nobody wrote
        torch.testing.assert_close(graphs.store.keys(layer), eager.store.keys(layer), atol=2e-5, rtol=0, equal_nan=True)


def test_tables_of_the_model_do_not_move_after_the_capture() -> None:
    """Rotary tables grow on demand, by 128 positions; a graph would go on reading the old one."""
    layout = KVLayout(num_blocks=160, block_size=4)
    graphs = Bench(RecordedBackend(), LlamaModel, layout=layout)
    eager = Bench(EagerBackend(), LlamaModel, LoopAttention(), layout)
    long = [(7 * i) % 40 for i in range(600)]
    for parts in ([(1, [3], 0)], [(2, long, 0)], [(2, [5], 600)], [(1, [4], 1)]):
        torch.testing.assert_close(graphs.step(*parts), eager.step(*parts), rtol=0, atol=2e-5)
    assert graphs.decision() == GraphDecision(REPLAYED, 1)


def test_a_sequence_past_all_limits_makes_graphs_anew() -> None:
    bench = Bench(RecordedBackend())
    bench.step((1, [3], 0))
    inputs = bench.inputs((2, [5], 0))
    longer = replace(inputs, segments=(replace(inputs.segments[0], num_context=200),))
    eager: Any = TableAttention()
    eager.run = lambda layer, q_TNH, *_: q_TNH
    bench.backend.execute(bench.model, longer, eager, bench.store)
    assert bench.decision() == GraphDecision("a sequence is longer than graphs are captured for")
    bench.step((1, [4], 1))
    assert bench.decision() == GraphDecision(CAPTURED, 1)


def test_logits_are_not_written_by_later_steps() -> None:
    bench = Bench(RecordedBackend())
    first = bench.step((1, [3], 0))
    copy = first.clone()
    bench.step((1, [9], 1))
    assert torch.equal(first, copy)


def test_a_capture_touches_the_scratch_block_alone() -> None:
    bench = Bench(RecordedBackend())
    bench.step((1, [3], 0), (2, [4], 0), (3, [5], 0))
    written = {slot for layer in range(2) for slot in _written(bench.store.whole.keys(layer))}
    own = {bench.pool.block_table(one)[0] * 4 for one in (1, 2, 3)}
    assert written == own | {LAYOUT.num_blocks * LAYOUT.block_size}
    assert len(bench.store.keys(0)) == len(bench.store.values(0)) == LAYOUT.num_blocks * LAYOUT.block_size


def _written(keys: torch.Tensor) -> list[int]:
    slots: list[int] = (~keys.isnan().flatten(1).any(1)).nonzero().flatten().tolist()
    return slots


def _eager_reason(bench: Bench, inputs: ModelInput) -> str:
    bench.backend.execute(bench.model, inputs, bench.attention, bench.store)
    assert bench.decision().bucket is None
    return bench.decision().reason


def test_steps_that_do_not_qualify_run_eagerly_with_a_reason() -> None:
    bench = Bench(RecordedBackend())
    for sequence_id in range(1, 6):
        bench.step((sequence_id, [3, 4], 0))
    two = bench.inputs((1, [5], 2), (2, [6], 2))
    reasons = [
        _eager_reason(bench, replace(two, copies=((0, 9),))),
        _eager_reason(bench, replace(two, logit_rows_R=torch.tensor([1]))),
        _eager_reason(bench, replace(two, logit_rows_R=torch.tensor([1, 0]))),
        _eager_reason(bench, bench.inputs(*((one, [7], 2) for one in range(1, 6)))),
    ]
    rows = "logits are not asked for once of every row in order"
    assert reasons == ["blocks are copied first", rows, rows, "more rows than the largest graph has, 4"]
    table = replace(two.segments[0], block_table=(*two.segments[0].block_table, *[0] * 24))
    assert "a block table is longer than the 24 blocks" in _eager_reason(
        bench, replace(two, segments=(table, two.segments[1]))
    )
    assert bench.backend.tools.num_captures == 0
    # Rows in another order, run eagerly, are what the graph gives in order.
    swapped = bench.backend.execute(
        bench.model, replace(two, logit_rows_R=torch.tensor([1, 0])), bench.attention, bench.store
    )
    torch.testing.assert_close(bench.step((1, [5], 2), (2, [6], 2)), swapped.flip(0), rtol=0, atol=2e-5)
    assert bench.decision() == GraphDecision(CAPTURED, 2)


def test_parts_that_cannot_be_graphs_are_named() -> None:
    plain = Bench(RecordedBackend(), attention=LoopAttention())
    assert not isinstance(plain.attention, GraphAttention)
    assert _eager_reason(plain, plain.inputs((1, [3], 0))) == "the attention has no plans for graphs"
    large = Bench(RecordedBackend(), layout=KVLayout(num_blocks=2, block_size=MOST_SCRATCH_TOKENS + 1))
    assert not isinstance(large.store, ScratchKVStore)
    assert "blocks too large to have one to spare" in _eager_reason(large, large.inputs((1, [3], 0)))
    prompted = Bench(RecordedBackend())
    prompted.model.spec = replace(prompted.model.spec, kv_of_prompt_length=True)
    assert "rotation depends on the length of the prompt" in _eager_reason(prompted, prompted.inputs((1, [3], 0)))
    other = Bench(RecordedBackend())
    other.step((1, [3], 0))
    other.attention = TableAttention()
    assert "with another attention or KV memory" in _eager_reason(other, other.inputs((1, [4], 1)))


def test_layers_in_groups_have_no_scratch_block() -> None:
    groups = (KVGroup(layers=(0,), num_blocks=12), KVGroup(layers=(1,), num_blocks=12, window=8))
    store = RecordedBackend().allocate_kv(replace(LAYOUT, groups=groups), TinyModel.read_spec(CONFIG))
    assert not isinstance(store, ScratchKVStore)


class FailingTools:
    def capture(self, function: Any) -> Captured:
        function()
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


def test_a_failed_capture_is_recorded_and_not_tried_again() -> None:
    tools, eager = FailingTools(), Bench(EagerBackend())
    bench = Bench(RecordedBackend(tools=tools))
    reason = "capturing 1 rows failed: operation not permitted when stream is capturing"
    for parts in ([(1, [3], 0)], [(1, [4], 1)]):
        torch.testing.assert_close(bench.step(*parts), eager.step(*parts), rtol=0, atol=2e-5)
    assert bench.backend.graphs.counts == {GraphDecision(reason): 2}


class WaitingAttention(TableAttention):
    def run(self, layer: Any, q_TNH: Any, k_TKH: Any, v_TKH: Any, plan: Any, kv: Any) -> torch.Tensor:
        if isinstance(plan, TablePlan):
            plan.num_keys_B.max().item()
        return super().run(layer, q_TNH, k_TKH, v_TKH, plan, kv)


def test_an_attention_that_waits_for_the_device_is_no_graph() -> None:
    """A real capture fails there too."""
    bench = Bench(RecordedBackend(), attention=WaitingAttention())
    assert "'item' makes the host wait" in _eager_reason(bench, bench.inputs((1, [3], 0)))


WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


def count_waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call by which the host waits for a device, as torch's tensors offer it, from here on."""
    found: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    for name in WAITS:
        watch(torch.Tensor, name)
    watch(torch.cuda, "synchronize")
    return found


def decode_steps(attention: Any) -> tuple[Bench, ModelRunner]:
    bench = Bench(RecordedBackend(), LlamaModel, attention)
    runner = ModelRunner(bench.backend, bench.model, bench.attention, bench.pool, bench.store)
    bench.step((1, [3, 1, 4], 0), (2, [9, 2], 0), (3, [6], 0))
    bench.step((1, [5], 3), (2, [3], 2), (3, [5], 1))
    return bench, runner


def test_a_replayed_step_waits_for_nothing_but_the_copy_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, runner = decode_steps(TableAttention())
    for sequence_id, num_tokens in ((1, 5), (2, 4), (3, 3)):
        grow(bench.pool, sequence_id, num_tokens)
    found = count_waits(monkeypatch)
    inputs = runner.make_input([Chunk(1, [7], 4), Chunk(2, [7], 3), Chunk(3, [7], 2)])
    with NoScalars():
        tokens_R = runner.run(inputs).argmax(-1)
    assert found == []
    assert bench.decision() == GraphDecision(REPLAYED, 4)
    tokens_R.tolist()  # the one copy of a step
    assert found == ["tolist"]


class NoScalars(NoWaits):
    """NoWaits, but tensors may be made of host data: what a graph is fed with is staged there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.startswith("lift_fresh") or func.overloadpacket.__name__ == "equal":
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_the_counters_of_waits_see_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    found, one = count_waits(monkeypatch), torch.ones(1)
    one.item(), one.tolist(), one.cpu(), one.numpy(), one.nonzero(), bool(one), int(one), float(one)
    [0, 1][one.long()]
    assert found == ["item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"]


def test_the_buckets_are_the_least_that_fit() -> None:
    assert [bucket_of(number, (1, 2, 4, 8)) for number in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, None]


def _checks() -> Sequence[Check]:
    return list(backend_checks(RecordedBackend))


@pytest.mark.parametrize("check", **cases(_checks()))
def test_a_backend_with_graphs_keeps_the_contract(check: Check) -> None:
    check.run()
