"""The CPU backend with a model of two matrices: what it hands to whom, in which order, and whose bits are whose."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pluglm.backends.cpu import CpuBackend
from pluglm.backends.linear import DenseLinear
from pluglm.kernel.core import ModelInput, Segment
from pluglm.kernel.errors import ConfigError, IncompatibleError
from pluglm.kernel.interfaces.backend import BackendContext
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.kv.store import TensorKVStore

WIDTH, VOCAB, BLOCK = 24, 40, 4
LAYER = LayerSpec(index=0, num_heads=3, num_kv_heads=3, head_dim=8, scale=8**-0.5)
SPEC = ModelSpec(family="small", hidden_size=WIDTH, vocab_size=VOCAB, max_position=64, layers=(LAYER,))
UNUSED: Any = None


class SmallModel:
    """Embedding, one linear layer for q = k = v, attention, and the embedding as head."""

    spec = SPEC

    def __init__(self, context: Any) -> None:
        self.context = context
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn((WIDTH, WIDTH), generator=generator).to(context.dtype)
        self.embedding = torch.randn((VOCAB, WIDTH), generator=generator).to(context.dtype)
        self.linear = context.make_linear("w", weight, None)
        self.head = context.make_linear("head", self.embedding.clone(), None)
        self.num_threads_seen: list[int] = [torch.get_num_threads()]

    @classmethod
    def load(cls, checkpoint: Any, context: Any) -> SmallModel:
        return cls(context)

    def forward(self, inputs: ModelInput, attend: Any) -> torch.Tensor:
        self.num_threads_seen.append(torch.get_num_threads())
        (x,) = self.context.map_rows(lambda ids: (self.linear(self.embedding[ids]),), inputs.token_ids_T)
        mixed: torch.Tensor = attend(LAYER, *(x.view(-1, 3, 8) for _ in range(3)))
        return mixed.reshape(-1, WIDTH)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.context.map_rows(lambda hidden: (self.head(hidden).float(),), hidden_RD)[0]
        return logits


class RowAttention:
    """Row by row, so that its shapes depend on a row's position alone. Counts its plans."""

    num_plans = 0

    def plan(self, batch: Any) -> Any:
        self.num_plans += 1
        return batch

    def run(self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, kv: Any) -> Any:
        kv.keys(0)[plan.slots_T], kv.values(0)[plan.slots_T] = k, v
        out = torch.empty_like(q)
        for segment in plan.segments:
            slots = [b * plan.block_size + i for b in segment.block_table for i in range(plan.block_size)]
            for i in range(segment.num_query):
                own = slots[: segment.num_context + i + 1]
                keys, values = kv.keys(0)[own], kv.values(0)[own]
                row = segment.query_start + i
                weights = torch.softmax((keys * q[row]).sum(-1) * layer.scale, dim=0)
                out[row] = (weights[..., None] * values).sum(0)
        return out


def backend(dtype: str = "float32", deterministic: bool = False, num_threads: int | None = None) -> CpuBackend:
    context = BackendContext(dtype=dtype, deterministic=deterministic, num_threads=num_threads)
    return CpuBackend(CpuBackend.Config(), context)


def load(cpu: CpuBackend, make_linear: Any = None) -> Any:
    family: Any = SmallModel
    return cpu.load_model(family, UNUSED, make_linear, UNUSED)


def batch(parts: Sequence[tuple[list[int], int, tuple[int, ...]]], rows: list[int], copies: Any = ()) -> ModelInput:
    """parts: (new token ids, number already computed, block table)."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    for new, context, table in parts:
        own = range(context, context + len(new))
        place = {"query_start": len(token_ids), "num_query": len(new), "num_context": context}
        segments.append(Segment(sequence_id=len(segments), block_table=table, **place))
        token_ids += new
        positions += own
        slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in own]
    return ModelInput(
        token_ids_T=torch.tensor(token_ids),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        logit_rows_R=torch.tensor(rows, dtype=torch.int64),
        segments=tuple(segments),
        block_size=BLOCK,
        copies=copies,
    )


def run(cpu: CpuBackend, model: Any, kv: Any, inputs: ModelInput) -> torch.Tensor:
    attention: Any = RowAttention()
    return cpu.execute(model, inputs, attention, kv)


def reference(token_ids: list[int], model: Any) -> torch.Tensor:
    """Logits of the last token in float64, from the weights of SmallModel."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((WIDTH, WIDTH), generator=generator).to(model.context.dtype).double()
    x = (model.embedding.double()[token_ids] @ weight.T).view(-1, 3, 8)
    weights = torch.softmax((x * x[-1]).sum(-1) * LAYER.scale, dim=0)
    logits: torch.Tensor = (weights[..., None] * x).sum(0).reshape(WIDTH) @ model.embedding.double().T
    return logits


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 2.0), ("float16", 0.2)])
def test_logits_agree_with_float64_in_every_dtype(dtype: str, limit: float) -> None:
    cpu = backend(dtype)
    model = load(cpu)
    kv = cpu.allocate_kv(KVLayout(num_blocks=4, block_size=BLOCK), SPEC)
    logits = run(cpu, model, kv, batch([([3, 1, 4], 0, (2,)), ([1, 5, 9, 2, 6], 0, (0, 3))], [7, 2]))
    assert kv.keys(0).dtype == getattr(torch, dtype)
    assert logits.dtype == torch.float32
    # The logits reach 100, and four roundings of relative size 2**-8 (2**-11 for float16) lie between.
    expected = torch.stack([reference([1, 5, 9, 2, 6], model), reference([3, 1, 4], model)])
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=limit)


def test_copies_come_before_the_step_and_the_plan_is_made_once() -> None:
    cpu, attention = backend(), RowAttention()
    model = load(cpu)
    kv = cpu.allocate_kv(KVLayout(num_blocks=3, block_size=BLOCK), SPEC)
    run(cpu, model, kv, batch([([3, 1], 0, (0,))], [1]))
    given: Any = attention
    logits = cpu.execute(model, batch([([4], 2, (1,)), ([7], 2, (0,))], [0, 1], copies=((0, 1),)), given, kv)
    expected = torch.stack([reference([3, 1, 4], model), reference([3, 1, 7], model)])
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-4)
    assert attention.num_plans == 1


def test_no_rows_give_no_logits() -> None:
    cpu = backend(deterministic=True)
    model = load(cpu)
    kv = cpu.allocate_kv(KVLayout(num_blocks=3, block_size=BLOCK), SPEC)
    assert run(cpu, model, kv, batch([([3, 1], 0, (0,))], [])).shape == (0, VOCAB)


def test_the_quantizers_layers_replace_the_plain_ones() -> None:
    made = []

    def make_linear(name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> DenseLinear:
        made.append(name)
        return DenseLinear(name, weight_NK, bias_N)

    assert isinstance(load(backend(), make_linear).linear, DenseLinear)
    assert made == ["w", "head"]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_deterministic_rows_have_the_same_bits_in_any_batch_and_chunking(num_threads: int) -> None:
    cpu = backend(deterministic=True, num_threads=num_threads)
    model = load(cpu)
    token_ids = [(7 * i) % VOCAB for i in range(20)]
    mates = [([(i + j) % VOCAB for j in range(11)], 0, (10 + 3 * i, 11 + 3 * i, 12 + 3 * i)) for i in range(3)]

    def last_row(cuts: list[int], with_mates: bool) -> torch.Tensor:
        kv = cpu.allocate_kv(KVLayout(num_blocks=30, block_size=BLOCK), SPEC)
        for first, last in zip([0, *cuts], [*cuts, 20], strict=True):
            before = mates if with_mates else []
            parts = [*before, (token_ids[first:last], first, (4, 0, 3, 1, 2))]
            logits = run(cpu, model, kv, batch(parts, [sum(len(part[0]) for part in parts) - 1]))
        return logits[0]

    alone = last_row([], with_mates=False)
    # Two threads are slow on a busy machine; one cut with mates shows whether they split the work differently.
    for cuts in ([1], [5, 6, 7], list(range(1, 20)), [16]) if num_threads == 1 else ([5, 13],):
        assert torch.equal(last_row(cuts, with_mates=False), alone), cuts
        assert torch.equal(last_row(cuts, with_mates=True), alone), cuts


def test_threads_are_set_while_it_works_and_put_back_after() -> None:
    before = torch.get_num_threads()
    cpu = backend(num_threads=before + 1)
    model = load(cpu)
    kv = cpu.allocate_kv(KVLayout(num_blocks=1, block_size=BLOCK), SPEC)
    run(cpu, model, kv, batch([([3], 0, (0,))], [0]))
    assert model.num_threads_seen == [before + 1] * 2
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="stop"):
        cpu.execute(model, batch([([3], 0, (0,))], [0]), failing_attention(), kv)
    assert torch.get_num_threads() == before


def failing_attention() -> Any:
    def plan(batch: Any) -> Any:
        raise RuntimeError("stop")

    return SimpleNamespace(plan=plan)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtype": "int8"}, ConfigError, "cannot run dtype 'int8'; use one of float32, bfloat16, float16"),
        ({"dtype": "bfloat16", "deterministic": True}, IncompatibleError, "float32 only, not in bfloat16"),
        ({"deterministic": True, "num_threads": 3}, IncompatibleError, "at most 2 threads"),
    ],
)
def test_what_it_cannot_do_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        backend(**arguments)


def test_deterministic_runs_never_use_more_than_two_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert load(backend(deterministic=True)).num_threads_seen == [2]
    finally:
        torch.set_num_threads(before)


def test_it_is_always_there_with_a_clock_and_memory() -> None:
    cpu = backend()
    assert CpuBackend.unavailable() is None
    assert "numerics:batch_invariant" in CpuBackend.capabilities(CpuBackend.Config()).provides
    assert cpu.device == "cpu"
    assert cpu.free_memory() > 0
    assert cpu.now() <= cpu.now()
    assert isinstance(cpu.allocate_kv(KVLayout(num_blocks=1, block_size=1), SPEC), TensorKVStore)
