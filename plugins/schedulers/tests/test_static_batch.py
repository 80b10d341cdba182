"""Closed examples of static batching: who is in which batch, and how many steps a batch takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pluglm import Engine, SamplingParams
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.testing.simulation import BLOCK_SIZE, Job, Turn, World, busy_world, play, world
from pluglm_schedulers.static_batch import StaticBatchScheduler

CONTEXT: Any = None  # the scheduler reads nothing of the run


def turns_of(place: World) -> list[Turn]:
    turns: list[Turn] = []
    play(place, StaticBatchScheduler(ComponentConfig(), CONTEXT), turns.append)
    assert not place.unfinished
    return turns


def planned(turns: list[Turn]) -> list[dict[int, int]]:
    return [{item.sequence_id: item.num_tokens for item in turn.plan.items} for turn in turns]


def test_nobody_joins_before_the_last_member_has_ended() -> None:
    """Two seats: 1 and 2 take 5 steps, the length of 2; only then 3 and 4, though 1 left its seat after one."""
    news = {1: 1, 2: 5, 3: 2, 4: 1}
    jobs = [Job(sequence_id=one, arrival=0, num_prompt=3, max_new=new) for one, new in news.items()]
    expected = [{1: 3, 2: 3}, {2: 1}, {2: 1}, {2: 1}, {2: 1}, {3: 3, 4: 3}, {3: 1}]
    assert planned(turns_of(world(jobs, num_seats=2))) == expected


def test_those_that_come_too_late_wait_for_the_next_batch_though_seats_are_free() -> None:
    jobs = [Job(sequence_id=one, arrival=arrival, num_prompt=2, max_new=3) for one, arrival in ((1, 0), (2, 1), (3, 2))]
    turns = turns_of(world(jobs, num_seats=4))
    assert planned(turns) == [{1: 2}, {1: 1}, {1: 1}, {2: 2, 3: 2}, {2: 1, 3: 1}, {2: 1, 3: 1}]


def test_prompts_are_chunked_within_the_budget_and_those_that_run_come_first() -> None:
    """Five tokens a step: 1 computes 5 + 2, its first token comes from the second step; 2 starts with what is left."""
    jobs = [
        Job(sequence_id=1, arrival=0, num_prompt=7, max_new=3),
        Job(sequence_id=2, arrival=0, num_prompt=6, max_new=1),
    ]
    assert planned(turns_of(world(jobs, num_tokens=5))) == [{1: 5}, {1: 2, 2: 3}, {1: 1, 2: 3}, {1: 1}]


def test_batch_ends_before_the_first_whose_whole_life_finds_no_room() -> None:
    """Ten blocks of 4 tokens: 1 and 2 may grow to 16 = 4 blocks each; 4 would fit in the rest and does not pass 3."""
    sizes = {1: (8, 8), 2: (1, 15), 3: (10, 2), 4: (1, 1)}
    jobs = [Job(sequence_id=one, arrival=0, num_prompt=prompt, max_new=new) for one, (prompt, new) in sizes.items()]
    batches = planned(turns_of(world(jobs, num_blocks=10)))
    assert batches[0] == {1: 8, 2: 1}
    assert next(one for one in batches if not {1, 2} & set(one)) == {3: 10, 4: 1}


def test_decodes_come_before_chunks_of_earlier_prompts() -> None:
    """Six tokens a step: 2 has its prompt behind it in the second step, and decodes ahead of the rest of 1."""
    jobs = [
        Job(sequence_id=1, arrival=0, num_prompt=20, max_new=1),
        Job(sequence_id=2, arrival=0, num_prompt=1, max_new=3),
    ]
    place = world(jobs, num_tokens=6)
    place.jobs[0].num_computed, place.jobs[0].running = 5, True
    place.jobs[1].num_known, place.jobs[1].num_computed, place.jobs[1].running = 2, 1, True
    place.order = [1, 2]
    place.pool.book.tables |= {1: [0, 1], 2: [2]}
    place.pool.book.sizes |= {1: 5, 2: 1}
    assert planned(turns_of(place)) == [{2: 1, 1: 5}, {2: 1, 1: 5}, {1: 5}]


def test_forked_outputs_join_the_batch_of_their_request_and_hold_up_the_next() -> None:
    """Two seats: 2 ends at once and leaves its seat to a fork of 1, which is 6; 1 leaves its own to 7; then comes 5."""
    jobs = [
        Job(sequence_id=1, arrival=0, num_prompt=6, max_new=3, num_lanes=3),
        Job(sequence_id=2, arrival=0, num_prompt=2, max_new=1),
        Job(sequence_id=5, arrival=0, num_prompt=2, max_new=1),
    ]
    turns = turns_of(world(jobs, num_seats=2))
    assert planned(turns) == [{1: 6, 2: 2}, {1: 1, 6: 1}, {1: 1, 6: 1}, {6: 1, 7: 1}, {7: 1}, {7: 1}, {5: 2}]
    assert [len(turn.after[7]) for turn in turns[1:4]] == [2, 2, 3]  # no room is kept before it has a seat


def test_adopted_tokens_are_not_planned_and_room_is_for_the_whole_life() -> None:
    place = world([Job(sequence_id=1, arrival=0, num_prompt=20, max_new=4, num_cached=16)], num_tokens=3)
    turns = turns_of(place)
    assert planned(turns) == [{1: 3}, {1: 1}, {1: 1}, {1: 1}, {1: 1}]
    assert len(turns[0].after[1]) == 24 // BLOCK_SIZE


def test_outputs_that_wait_let_go_of_their_kv_only_when_none_could_start() -> None:
    """The pool of 4 blocks holds one life of 16 tokens: two forks share half of it, and the copy finds no room."""
    place = world([Job(sequence_id=1, arrival=0, num_prompt=8, max_new=8, num_lanes=3)], num_blocks=4)
    assert [turn.plan.preempted for turn in turns_of(place) if turn.plan.preempted] == [(3,)]


@pytest.mark.parametrize("seed", range(4))
def test_room_is_kept_for_the_whole_life_and_nobody_is_preempted(seed: int) -> None:
    for turn in turns_of(busy_world(seed)):
        assert turn.plan.preempted == ()
        for item in turn.plan.items:
            one = turn.views[item.sequence_id]
            assert BLOCK_SIZE * len(turn.after[item.sequence_id]) >= one.num_prompt + one.max_new_tokens


@pytest.mark.parametrize("drafter", [None, {"use": "ngram", "num_tokens": 4}])
def test_tokens_are_those_of_fcfs(make_engine: Callable[..., Engine], drafter: Any) -> None:
    """With refused drafts too, whose KV the engine takes back from what was reserved."""
    prompts = [{"prompt_token_ids": [1 + index, 2, 3, 2, 3] * (1 + index % 3)} for index in range(10)]
    params = [SamplingParams(temperature=0, max_tokens=3 + 7 * index % 20, ignore_eos=True) for index in range(10)]
    tokens = []
    for scheduler in ("fcfs", "static_batch"):
        with make_engine(scheduler, seats=3, step_tokens=8, num_blocks=20, drafter=drafter) as engine:
            outputs = engine.generate(prompts, params)
            assert [one.error for one in outputs] == [None] * 10
            assert engine._core.kv.capacity().held_blocks == 0
            drafted = sum(one.metrics.num_drafted for one in outputs if one.metrics is not None)
            assert (drafted > 0) == (drafter is not None)
            tokens.append([one.token_ids for one in outputs])
    assert tokens[0] == tokens[1]
    assert [len(one) for one in tokens[0]] == [3 + 7 * index % 20 for index in range(10)]


def test_cancelled_members_do_not_hold_up_the_next_batch(make_engine: Callable[..., Engine]) -> None:
    long = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with make_engine("static_batch", seats=2, step_tokens=4) as engine:
        first = [engine.submit({"prompt_token_ids": [3] * 6}, long) for _ in range(2)]
        last = engine.submit({"prompt_token_ids": [4]}, short)
        engine.step()
        assert all(map(engine.cancel, first))  # one runs, one has not started
        assert [event.finish_reason for event in engine.events(last)][-1] == "length"
