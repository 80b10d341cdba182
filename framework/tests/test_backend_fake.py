"""The fake backend against a recomputation of its hash in plain Python, with hashlib and the documented formula."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.backends.fake import FakeBackend
from pluglm.kernel.core import ModelInput, Segment
from pluglm.kernel.errors import ComponentFailure, ConfigError
from pluglm.kernel.interfaces.backend import BackendContext
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import ModelSpec

VOCAB = 50
SPEC = ModelSpec(family="llama", hidden_size=8, vocab_size=VOCAB, max_position=64, layers=())
UNUSED: Any = None


class Family:
    """Knows its shape, and fails if anything else is asked of it."""

    @classmethod
    def read_spec(cls, config: Any) -> ModelSpec:
        return SPEC


def backend(**config: Any) -> FakeBackend:
    context = BackendContext(dtype="float32", deterministic=True, num_threads=None)
    return FakeBackend(FakeBackend.Config(**config), context)


def model_of(fake: FakeBackend) -> Any:
    family: Any = Family
    checkpoint: Any = SimpleNamespace(config={})
    return fake.load_model(family, checkpoint, None, UNUSED)


def batch(parts: Sequence[tuple[Sequence[int], int, tuple[int, ...]]], block_size: int, copies: Any = ()) -> ModelInput:
    """parts: (new token ids, number already computed, block table); logits for every row."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    for new, context, table in parts:
        segments.append(
            Segment(
                sequence_id=len(segments),
                query_start=len(token_ids),
                num_query=len(new),
                num_context=context,
                block_table=table,
            )
        )
        own = range(context, context + len(new))
        token_ids += new
        positions += own
        slots += [table[p // block_size] * block_size + p % block_size for p in own]
    return ModelInput(
        token_ids_T=torch.tensor(token_ids),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        logit_rows_R=torch.arange(len(token_ids)),
        segments=tuple(segments),
        block_size=block_size,
        copies=copies,
    )


def expected_row(token_ids: Sequence[int], vocab_size: int = VOCAB) -> list[float]:
    data = b"".join(t.to_bytes(8, "little") + p.to_bytes(8, "little") for p, t in enumerate(token_ids))
    digest = hashlib.blake2b(data, digest_size=40).digest()
    numbers = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 40, 8)]
    factor, shift = numbers[4] % 1020 + 1, numbers[4] // 1021
    row = [float(np.float32((i * factor + shift) % 1021) / np.float32(1021)) for i in range(vocab_size)]
    for number, logit in ((numbers[3], 2.0), (numbers[2], 4.0), (numbers[1], 6.0), (numbers[0], 8.0)):
        row[number % vocab_size] = logit
    return row


def run(fake: FakeBackend, inputs: ModelInput, store: Any) -> torch.Tensor:
    return fake.execute(model_of(fake), inputs, UNUSED, store)


def test_logits_are_the_documented_hash_of_the_prefix() -> None:
    fake = backend()
    store = fake.allocate_kv(KVLayout(num_blocks=5, block_size=4), SPEC)
    first = run(fake, batch([([7, 8, 9], 0, (3,)), ([1] * 6, 0, (0, 4))], 4), store)
    second = run(fake, batch([([2, 3], 3, (3, 1)), ([5], 6, (0, 4))], 4), store)
    sequences = [[7, 8, 9, 2, 3], [1] * 6 + [5]]
    assert first.dtype == torch.float32
    assert first.tolist() == [
        expected_row(s[:n]) for s, m in zip(sequences, (3, 6), strict=True) for n in range(1, m + 1)
    ]
    assert second.tolist() == [expected_row(sequences[0][:4]), expected_row(sequences[0]), expected_row(sequences[1])]
    assert all(max(row) == 8.0 and row.count(8.0) == 1 for row in first.tolist())


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_chunking_and_block_size_gives_the_same_row(data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
    block_size = data.draw(st.integers(1, 8))
    table = tuple(data.draw(st.permutations(range(-(-20 // block_size)))))
    fake = backend()
    store = fake.allocate_kv(KVLayout(num_blocks=len(table), block_size=block_size), SPEC)
    done, rows = 0, []
    while done < len(token_ids):
        count = data.draw(st.integers(1, len(token_ids) - done))
        rows += run(fake, batch([(token_ids[done : done + count], done, table)], block_size), store).tolist()
        done += count
    assert rows == [expected_row(token_ids[:n]) for n in range(1, len(token_ids) + 1)]


@pytest.mark.parametrize("table", [(1, 2), (2, 0), (0, 1)])
def test_a_wrong_or_stale_block_changes_the_row(table: tuple[int, int]) -> None:
    fake = backend()
    store = fake.allocate_kv(KVLayout(num_blocks=3, block_size=2), SPEC)
    run(fake, batch([([4, 4], 0, (0,)), ([4, 4, 4], 0, (1, 2))], 2), store)
    row = run(fake, batch([([9], 3, table)], 2), store)[0].tolist()
    assert (row == expected_row([4, 4, 4, 9])) is (table == (1, 2))


def test_copies_happen_before_the_writes() -> None:
    fake = backend()
    store = fake.allocate_kv(KVLayout(num_blocks=3, block_size=4), SPEC)
    run(fake, batch([([4, 5], 0, (0,))], 4), store)
    logits = run(fake, batch([([6], 2, (1,)), ([7], 2, (0,))], 4, copies=((0, 1),)), store)
    assert logits.tolist() == [expected_row([4, 5, 6]), expected_row([4, 5, 7])]


def test_the_clock_moves_by_executed_steps_only() -> None:
    fake = backend(step_base_s=2.0, token_s=0.25)
    store = fake.allocate_kv(KVLayout(num_blocks=2, block_size=4), SPEC)
    assert fake.now() == fake.now() == 0.0
    run(fake, batch([([1, 2, 3], 0, (0,))], 4), store)
    assert fake.now() == 2.75


def test_every_part_of_a_batch_has_its_price() -> None:
    """Two decodes behind 1 and 2 keys and a chunk of 3 behind 2: 5 tokens, 5 rows, keys 2 + 3 + (3 + 4 + 5)."""
    fake = backend(step_base_s=1.0, token_s=0.5, row_s=8.0, chunk_s=64.0, context_s=0.25)
    store = fake.allocate_kv(KVLayout(num_blocks=4, block_size=8), SPEC)
    run(fake, batch([([1], 1, (0,)), ([2], 2, (1,)), ([3, 4, 5], 2, (2,))], 8), store)
    assert fake.now() == 1.0 + 0.5 * 5 + 8.0 * 5 + 64.0 * 1 + 0.25 * (2 + 3 + 12)


def test_the_clock_can_be_moved_on_and_never_back() -> None:
    fake = backend()
    fake.advance(1.5)
    fake.advance_to(2.0)
    fake.advance_to(0.5)
    fake.advance(0.0)
    assert fake.now() == 2.0
    with pytest.raises(ValueError, match="cannot go back"):
        fake.advance(-0.1)


def test_cheap_rows_depend_on_the_last_stored_token_and_position_alone() -> None:
    fake = backend(logits="cheap")
    store = fake.allocate_kv(KVLayout(num_blocks=3, block_size=4), SPEC)
    rows = run(fake, batch([([7, 8, 9], 0, (2,)), ([9], 2, (0,))], 4), store)
    winners = [
        (48271 * token + 69621 * position + 1) % (2**31 - 1) % VOCAB for token, position in ((7, 0), (8, 1), (9, 2))
    ]
    assert rows.tolist() == [[float(i == winner) for i in range(VOCAB)] for winner in (*winners, winners[2])]


def test_the_model_may_have_fewer_ids_but_not_more() -> None:
    store = backend().allocate_kv(KVLayout(num_blocks=3, block_size=4), SPEC)
    assert run(backend(vocab_size=20), batch([([7, 8], 0, (2,))], 4), store).tolist() == [
        expected_row([7], 20),
        expected_row([7, 8], 20),
    ]
    assert run(backend(vocab_size=VOCAB + 1, logits="cheap"), batch([([7], 0, (2,))], 4), store).shape == (1, VOCAB)


def test_no_rows_give_no_logits() -> None:
    fake = backend()
    store = fake.allocate_kv(KVLayout(num_blocks=2, block_size=4), SPEC)
    inputs = batch([([1, 2], 0, (0,))], 4)
    without: Any = SimpleNamespace(**{name: getattr(inputs, name) for name in ModelInput.__slots__})
    without.logit_rows_R = torch.empty(0, dtype=torch.int64)
    assert run(fake, without, store).shape == (0, VOCAB)
    assert run(backend(logits="cheap"), without, store).shape == (0, VOCAB)


def test_what_it_declares_and_refuses() -> None:
    capabilities = FakeBackend.capabilities(FakeBackend.Config())
    assert capabilities.provides >= {"numerics:batch_invariant", "attention:unused"}
    assert "no weights" in capabilities.refuses["slot:quantizer"]
    assert backend(memory_bytes=123).free_memory() == 123
    assert FakeBackend.unavailable() is None
    with pytest.raises(ComponentFailure, match="no weights"):
        model_of(backend()).forward(None, None)
    with pytest.raises(ConfigError, match="'int3'"):
        FakeBackend(FakeBackend.Config(), BackendContext(dtype="int3", deterministic=False, num_threads=None))
