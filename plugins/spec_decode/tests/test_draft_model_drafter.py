"""The draft_model drafter against plain greedy continuation of the whole text, which has no cache to get wrong."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from pluglm.kernel.core import Chunk
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.drafter import DraftRequest
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.kv.paged import PagedKV
from pluglm.testing.drafter import draft_request
from pluglm_spec_decode.same_vocabulary import read_vocabulary

MAX_POSITION = 60


def request(sequence_id: int, token_ids: list[int], max_tokens: int = 99) -> DraftRequest:
    return draft_request(token_ids, sequence_id=sequence_id, max_tokens=max_tokens)


def commit(drafter, generator, sequence_id: int, text: list[int], drafts: list[int]) -> list[int]:
    """A step of the engine: some drafts are accepted, then a token of the target follows."""
    num_accepted = generator.randint(0, len(drafts))
    committed = [*drafts[:num_accepted], generator.randrange(50)]
    drafter.observe(sequence_id, num_accepted, committed)
    return text + committed


def test_drafts_are_plain_greedy(any_kv, make_bench, greedy):
    bench = make_bench(any_kv(), num_tokens=5)
    texts = {1: [3, 1, 4], 2: list(range(20)), 3: [7]}
    proposals = bench.propose([request(sequence_id, text) for sequence_id, text in texts.items()])
    assert proposals == [greedy(text, 5) for text in texts.values()]
    assert all(token_id < 50 for drafts in proposals for token_id in drafts)
    # 24 known tokens in one call, then one call a position for all three
    assert bench.runner.calls == [(3, 24), (3, 3), (3, 3), (3, 3), (3, 3)]


def test_ragged_lengths(any_kv, make_bench, greedy):
    bench = make_bench(any_kv(), num_tokens=4)
    limits = [0, 1, 2, 4, 9]
    requests = [request(index, [index, 5, 6], limit) for index, limit in enumerate(limits)]
    assert bench.propose(requests) == [greedy([i, 5, 6], min(4, n)) for i, n in enumerate(limits)]
    assert [sequences for sequences, _ in bench.runner.calls] == [4, 3, 2, 2]
    assert bench.propose([]) == []
    assert bench.propose([request(9, [], 3)]) == [[]]


def test_interleaved_sequences_equal_each_alone(any_kv, make_bench, greedy):
    """Joins, leaves, preemption and random accept lengths of 8 sequences; the reference sees one text at a time."""
    generator = random.Random(11)
    bench = make_bench(any_kv(), max_step_tokens=16, num_tokens=4)
    texts: dict[int, list[int]] = {}
    num_checked = 0
    for _ in range(250):
        for sequence_id in generator.sample(range(8), generator.randint(1, 8)):
            if sequence_id not in texts:
                texts[sequence_id] = generator.choices(range(50), k=generator.randint(1, 12))
            elif generator.random() < 0.05 or len(texts[sequence_id]) > MAX_POSITION + 4:
                bench.drafter.release(sequence_id)  # ended, or preempted and soon back with the same text
                if generator.random() < 0.7 or len(texts[sequence_id]) > MAX_POSITION:
                    del texts[sequence_id]
        chosen = generator.sample(sorted(texts), generator.randint(0, len(texts)))
        limits = [generator.randint(0, 6) for _ in chosen]
        requests = [request(s, texts[s], limit) for s, limit in zip(chosen, limits, strict=True)]
        proposals = bench.propose(requests)
        for sequence_id, limit, drafts in zip(chosen, limits, proposals, strict=True):
            text = texts[sequence_id]
            room = max(0, MAX_POSITION + 1 - len(text))
            assert drafts == greedy(text, min(4, limit, room))
            num_checked += len(drafts)
        if generator.random() < 0.3:
            assert bench.propose(requests) == proposals
        for sequence_id, drafts in zip(chosen, proposals, strict=True):
            texts[sequence_id] = commit(bench.drafter, generator, sequence_id, texts[sequence_id], drafts)
        bench.runner.kv.audit()
    assert num_checked > 1000
    assert bench.drafter.num_exhausted == 0
    for sequence_id in range(8):
        bench.drafter.release(sequence_id)
    capacity = bench.runner.kv.capacity()
    assert capacity.free_blocks == capacity.total_blocks


@pytest.mark.parametrize("num_accepted", range(5))
def test_refusal_at_every_position(make_bench, small_pool, greedy, num_accepted):
    """The next proposal is that of a fresh drafter, and only what is new is computed."""
    bench = make_bench(small_pool(), num_tokens=4)
    text = [8, 2, 5, 9, 9, 1]
    drafts = bench.propose([request(0, text)])[0]
    bench.drafter.observe(0, num_accepted, [*drafts[:num_accepted], 33])
    text += [*drafts[:num_accepted], 33]
    bench.runner.calls.clear()
    assert bench.propose([request(0, text)]) == [greedy(text, 4)]
    # the fourth draft was never fed, so its KV is still to be computed
    assert bench.runner.calls[0] == (1, 2 if num_accepted == 4 else 1)


def test_observe_gives_back_blocks(make_bench, small_pool):
    bench = make_bench(small_pool(num_blocks=20, block_size=1), num_tokens=6)
    drafts = bench.propose([request(0, [1, 2, 3])])[0]
    assert bench.runner.kv.capacity().held_blocks == 8
    bench.drafter.observe(0, 2, [*drafts[:2], 40])
    assert bench.runner.kv.capacity().held_blocks == 5
    bench.drafter.observe(0, 0, [41])
    assert bench.runner.kv.capacity().held_blocks == 5
    bench.drafter.observe(7, 0, [1])  # never drafted for
    bench.drafter.release(7)


def test_proposing_twice_computes_once(make_bench, small_pool, greedy):
    bench = make_bench(small_pool(), num_tokens=4)
    requests = [request(0, [1, 2, 3]), request(1, [4])]
    first = bench.propose(requests)
    num_calls = len(bench.runner.calls)
    assert bench.propose(requests) == first
    assert bench.propose([request(0, [1, 2, 3], 2)]) == [first[0][:2]]
    assert len(bench.runner.calls) == num_calls
    bench.propose([request(2, [1, 2, 3], 2)])
    assert bench.propose([request(2, [1, 2, 3], 4)]) == [greedy([1, 2, 3], 4)]


def test_draws_are_those_of_the_softmax(any_kv, make_bench, scores):
    """Beside greedy requests, whose drafts are fixed: rows by a softmax in float64, ids by its running sum."""
    bench = make_bench(any_kv(), num_tokens=3, draws=True)
    warm, cold = SamplingParams(temperature=3000.0), SamplingParams(temperature=0.0)
    requests = [
        draft_request([3, 1, 4], sequence_id=1, params=warm, seed=5),
        draft_request([3, 1, 4], sequence_id=2, params=cold),
        draft_request([9, 9], sequence_id=3, params=warm, seed=6, prompt_token_ids=(9,)),
    ]
    for request, proposal in zip(requests, bench.drafter.propose(requests), strict=True):
        if request.request.params.greedy:
            assert proposal.rows_kV is None
            continue
        known = list(request.token_ids)
        for row_V, coin in zip(proposal.rows_kV, request.coins(3), strict=True):
            weights = np.exp(np.array(scores(known)[:50]) / request.request.params.temperature)
            expected_V = weights / weights.sum()
            np.testing.assert_allclose(row_V[:50], expected_V, atol=1e-6)
            assert not row_V[50:].any()
            known.append(int((expected_V.cumsum() > coin).argmax()))
        assert known[len(request.token_ids) :] == proposal.token_ids


def test_long_catch_up_is_cut_into_steps(any_kv, make_bench, greedy):
    bench = make_bench(any_kv(), max_step_tokens=8, num_tokens=2)
    texts = [list(range(21)), [3, 3], list(range(30, 9, -1))]
    assert bench.propose([request(i, text) for i, text in enumerate(texts)]) == [greedy(t, 2) for t in texts]
    assert all(num_tokens <= 8 for _, num_tokens in bench.runner.calls)


@pytest.mark.parametrize(("length", "count"), [(56, 4), (57, 4), (58, 3), (60, 1), (61, 0), (90, 0)])
def test_end_of_the_draft_models_context(make_bench, small_pool, greedy, length, count):
    bench = make_bench(small_pool(), max_step_tokens=99, num_tokens=4)
    text = [index % 50 for index in range(length)]
    assert bench.propose([request(0, text), request(1, [6])]) == [greedy(text, count), greedy([6], 4)]


def test_full_cache_leaves_a_sequence_without_drafts(make_bench, small_pool, greedy):
    bench = make_bench(small_pool(num_blocks=5, block_size=4), num_tokens=3)
    short, other, long = [1, 2, 3], [4, 5, 6, 7], list(range(17))
    assert bench.propose([request(0, short), request(1, long), request(2, other)]) == [
        greedy(short, 3), [], greedy(other, 3),
    ]  # fmt: skip
    assert bench.drafter.num_exhausted == 1
    grown = [*short, *range(14)]  # needs five of the blocks, two are held by the other
    bench.drafter.observe(0, 0, list(range(14)))
    assert bench.propose([request(0, grown)]) == [[]]
    assert bench.drafter.num_exhausted == 2
    bench.runner.kv.audit()
    bench.drafter.release(2)
    assert bench.propose([request(0, grown)]) == [greedy(grown, 3)]
    bench.drafter.release(0)
    bench.drafter.release(0)
    assert bench.propose([request(1, long)]) == [greedy(long, 3)]
    assert bench.runner.kv.capacity().free_blocks == 0


def test_too_long_for_an_empty_pool(make_bench, small_pool):
    bench = make_bench(small_pool(num_blocks=2, block_size=4), num_tokens=3)
    assert bench.propose([request(0, list(range(9)))]) == [[]]
    assert bench.runner.calls == []
    assert bench.runner.kv.capacity().held_blocks == 0


def test_a_failed_call_leaves_a_usable_drafter(make_bench, small_pool, greedy):
    bench = make_bench(small_pool(), num_tokens=3)
    run, text = bench.runner.run, [1, 2, 3, 4, 5]

    def fail(inputs):
        raise RuntimeError("device lost")

    bench.propose([request(0, text[:2])])
    bench.runner.run = fail
    with pytest.raises(RuntimeError, match="device lost"):
        bench.propose([request(0, text), request(1, text)])
    bench.runner.run = run
    assert bench.propose([request(0, text), request(1, text)]) == [greedy(text, 3)] * 2


def test_block_copies_are_done_once(make_bench, greedy, plain_context):
    """Another holder of the sequence's blocks makes the next extension a copy; the catch-up takes several calls."""
    kv = PagedKV(PagedKV.Config(block_size=4, num_blocks=30), plain_context)
    bench = make_bench(kv, max_step_tokens=2, num_tokens=3)
    text = [1, 2, 3, 4, 5, 6]
    drafts = bench.propose([request(0, text)])[0]
    bench.drafter.observe(0, 1, [drafts[0], 9, 10, 11])
    text += [drafts[0], 9, 10, 11]
    transaction = kv.transaction()
    transaction.fork(0, 99)
    transaction.commit()
    assert bench.propose([request(0, text)]) == [greedy(text, 3)]
    assert kv.block_table(0)[1] != kv.block_table(99)[1]


def test_another_holder_of_the_blocks_is_not_overwritten(make_bench, greedy, plain_context):
    """Tokens that are computed again are written again, so a shared block must be left to its other holder."""
    kv = PagedKV(PagedKV.Config(block_size=2, num_blocks=30), plain_context)
    bench = make_bench(kv, num_tokens=3)
    bench.propose([request(0, [1, 2, 3, 4])])
    transaction = kv.transaction()
    transaction.fork(0, 99)
    transaction.commit()
    changed = [1, 2, 30, 31]
    bench.drafter.observe(0, 0, [])
    assert bench.propose([request(0, changed)]) == [greedy(changed, 3)]
    parts = [Chunk(99, [5], 4)]
    logits = bench.runner.run(bench.runner.make_input(parts))
    assert logits[0, :50].argmax().item() == greedy([1, 2, 3, 4, 5], 1)[0]


def test_the_runner_is_asked_for(make_bench, small_pool):
    assert make_bench(small_pool()).asked == ["small"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({3: "other", 9: "also"}, "id 3 is 'other' there and 't3' here"),
        ({7: None}, "id 7 is nothing there and 't7' here"),
        ({50: "extra"}, "id 50 is 'extra' there and nothing here"),
        ({2: "t4", 4: "t2"}, "id 2 is 't4' there and 't2' here"),
    ],
)
def test_another_vocabulary_is_refused(make_bench, small_pool, named_tokens, changes, words):
    with pytest.raises(PluginError, match="choose a model with the same tokenizer") as caught:
        make_bench(small_pool(), draft_tokens=named_tokens(changes))
    assert words in str(caught.value)
    assert "'small'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unigram_vocabularies_are_lists():
    """The form of SentencePiece Unigram models in the `tokenizers` library: [token, score] in the order of the ids."""
    data = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5]]}, "added_tokens": None}
    assert read_vocabulary(json.dumps(data)) == {0: "<unk>", 1: "a"}
    added = {**data, "added_tokens": [{"id": 0, "content": "<pad>"}, {"id": 5, "content": "<end>"}]}
    assert read_vocabulary(json.dumps(added)) == {0: "<pad>", 1: "a", 5: "<end>"}
