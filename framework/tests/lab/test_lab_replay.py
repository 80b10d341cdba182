"""Replays on the virtual clock against times added up by hand from the fake backend's prices, and queueing theory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pluglm.lab.metrics import Targets
from pluglm.lab.simulate import simulate

BASE, TOKEN, ROW, CHUNK, KEY = 1.0, 0.25, 0.0625, 0.5, 2.0**-10  # conftest.PRICES


def keys_of(first: int, count: int) -> int:
    """Keys seen by `count` tokens, the first of which sees `first`."""
    return sum(range(first, first + count))


def test_one_request_by_hand(make_config, ask):
    """Prompt 10 in one step, then three steps of one token each, which see 11, 12 and 13 keys."""
    run = simulate(make_config(), (ask("a", 10, 4, at=2.0),))
    (one,) = run.outcomes
    first = BASE + 10 * TOKEN + ROW + CHUNK + keys_of(1, 10) * KEY
    decode = 3 * (BASE + TOKEN + ROW) + keys_of(11, 3) * KEY
    assert (one.finish_reason, one.num_prompt, one.num_output) == ("length", 10, 4)
    assert one.arrival_s == 2.0
    assert one.ttft_s == first
    assert one.tpot_s == decode / 3
    assert one.total_s == first + decode
    assert (len(run.steps), run.clock_s) == (4, 2.0 + first + decode)


def test_a_prompt_longer_than_a_step_is_cut_and_has_one_row(make_config, ask):
    run = simulate(make_config(), (ask("a", 150, 1),))
    expected = 3 * (BASE + CHUNK) + 150 * TOKEN + ROW + keys_of(1, 150) * KEY
    assert [step.num_tokens for step in run.steps] == [64, 64, 22]
    assert run.outcomes[0].ttft_s == expected


def test_two_requests_share_their_steps(make_config, ask):
    run = simulate(make_config(), (ask("a", 10, 2), ask("b", 20, 3)))
    first = BASE + 30 * TOKEN + 2 * (ROW + CHUNK) + (keys_of(1, 10) + keys_of(1, 20)) * KEY
    second = BASE + 2 * (TOKEN + ROW) + (11 + 21) * KEY
    third = BASE + TOKEN + ROW + 22 * KEY
    a, b = run.outcomes
    assert (a.ttft_s, b.ttft_s) == (first, first)
    assert (a.total_s, b.total_s) == (first + second, first + second + third)


def test_who_comes_during_a_step_waits_for_its_end_and_the_wait_counts(make_config, ask):
    run = simulate(make_config(), (ask("a", 40, 1), ask("b", 8, 1, at=1.5)))
    busy = BASE + 40 * TOKEN + ROW + CHUNK + keys_of(1, 40) * KEY
    own = BASE + 8 * TOKEN + ROW + CHUNK + keys_of(1, 8) * KEY
    assert run.outcomes[1].ttft_s == busy + own - 1.5


def test_the_clock_jumps_over_idle_times(make_config, ask):
    run = simulate(make_config(), (ask("a", 4, 1), ask("b", 4, 1, at=1e6)))
    assert run.outcomes[0].ttft_s == run.outcomes[1].ttft_s
    assert len(run.steps) == 2


def test_one_seat_and_one_step_a_request_is_the_queue_of_lindley(make_config, ask):
    """W' = max(0, W + S - A), Lindley (1952); the mean wait of M/D/1 is rho S / (2 (1 - rho)), Pollaczek-Khinchine."""
    config = make_config({"step_base_s": 0.5, "token_s": 0.0, "row_s": 0, "chunk_s": 0, "context_s": 0}, max_num_seqs=1)
    gaps = np.random.default_rng(3).exponential(0.5 / 0.4, 3000)
    arrivals = np.cumsum(gaps).tolist()
    run = simulate(config, tuple(ask(f"r{i}", 3, 1, at=at) for i, at in enumerate(arrivals)))
    waits = itertools.accumulate(gaps[1:], lambda wait, gap: max(0.0, wait + 0.5 - gap), initial=0.0)
    ttft = np.array([one.ttft_s for one in run.outcomes])
    np.testing.assert_allclose(ttft, np.array(list(waits)) + 0.5, atol=1e-9)
    assert ttft.mean() - 0.5 == pytest.approx(0.4 * 0.5 / (2 * 0.6), rel=0.15)  # rho = 0.4


def test_a_turn_holds_all_before_it_and_comes_after_the_think_time(make_config, ask):
    """Turn 2 has 10 + 3 + 5 tokens; with a prefix cache, the full blocks of turn 1's 12 computed ones are adopted."""
    turns = (ask("s.0", 10, 3), ask("s.1", 5, 2, at=4.0, after="s.0"), ask("s.2", 1, 1, at=0.5, after="s.1"))
    run = simulate(make_config(kv={"use": "hash_prefix", "block_size": 4, "num_blocks": 64}), turns)
    first, second, third = run.outcomes
    assert [one.num_prompt for one in run.outcomes] == [10, 18, 18 + 2 + 1]
    assert second.arrival_s == first.finished_s + 4.0
    assert third.arrival_s == second.finished_s + 0.5
    assert [one.num_cached for one in run.outcomes] == [0, 12, 16]
    expected = BASE + 6 * TOKEN + ROW + CHUNK + keys_of(13, 6) * KEY
    assert second.ttft_s == expected
    assert run.steps[3].seconds == expected
    assert run.summary(Targets()).cache_hit_rate == 28 / (10 + 18 + 21)


def test_equal_parts_are_equal_tokens(make_config, ask):
    shared = (("prefix", 32), ("own", 4))
    trace = (ask("a", 0, 1, prompt=shared), ask("b", 0, 1, at=99.0, prompt=(("prefix", 32), ("other", 4))))
    run = simulate(make_config(kv={"use": "hash_prefix", "block_size": 16, "num_blocks": 8}), trace)
    assert [one.num_cached for one in run.outcomes] == [0, 32]


def test_a_salt_keeps_prefixes_apart(make_config, ask):
    trace = tuple(
        ask(f"r{i}", 0, 1, at=50.0 * i, prompt=(("same", 33),), salt=s) for i, s in enumerate(("x", "y", "x"))
    )
    run = simulate(make_config(kv={"use": "hash_prefix", "block_size": 16, "num_blocks": 16}), trace)
    assert [one.num_cached for one in run.outcomes] == [0, 0, 32]


def test_a_cancelled_request_ends_when_its_caller_goes(make_config, ask):
    """A step of 1 token takes more than a second, so at 4.0 s the third step is under way and ends the request."""
    run = simulate(make_config(), (ask("a", 1, 50, cancel_s=4.0), ask("b", 1, 2, at=100.0, cancel_s=90.0)))
    cancelled, done = run.outcomes
    assert (cancelled.finish_reason, done.finish_reason) == ("cancelled", "length")
    assert cancelled.num_output == 4
    assert 4.0 <= cancelled.finished_s <= 4.0 + BASE + TOKEN + ROW + 5 * KEY


def test_a_deadline_counts_from_the_arrival_not_from_the_submission(make_config, ask):
    """`late` comes during a step of 12 s and may take 13: its own deadline falls into its second step."""
    run = simulate(
        make_config(),
        (ask("a", 40, 1), ask("late", 1, 9, at=0.5, deadline_s=13.0), ask("c", 1, 2, at=50.0, deadline_s=9.0)),
    )
    _, late, in_time = run.outcomes
    assert (late.finish_reason, in_time.finish_reason) == ("deadline", "length")
    assert 0 < late.num_output < 9
    assert 13.5 <= late.finished_s <= 13.5 + 2 * (BASE + TOKEN + ROW)


def test_what_cannot_fit_is_refused_and_its_session_is_over(make_config, ask):
    turns = (ask("s.0", 5000, 1), ask("s.1", 1, 1, after="s.0"), ask("s.2", 1, 1, after="s.1"), ask("b", 5, 1))
    run = simulate(make_config(), turns)
    assert [one.finish_reason for one in run.outcomes] == ["refused", "not_sent", "not_sent", "length"]
    assert "1024" in run.outcomes[0].error
    assert run.summary(Targets()).reasons == {"length": 1, "refused": 1, "not_sent": 2}


def test_preemptions_and_recomputed_tokens_are_counted(make_config, ask):
    """Three requests of 16 + 32 tokens and a pool of 6 blocks: they can only start together."""
    trace = tuple(ask(name, 16, 32) for name in "abc")
    run = simulate(make_config(kv={"use": "paged", "block_size": 16, "num_blocks": 6}), trace)
    summary = run.summary(Targets())
    assert summary.reasons == {"length": 3}
    assert summary.num_preemptions >= 1
    assert summary.num_recomputed_tokens >= 16
    computed = sum(step.num_tokens for step in run.steps)
    assert computed == 3 * (16 + 31) + summary.num_recomputed_tokens  # the last token of each is never computed
    assert run.kv_tokens == 96


def test_progress_ends_at_the_number_of_requests(make_config, ask):
    seen = []
    simulate(make_config(), (ask("a", 3, 1), ask("b", 3, 1)), progress=lambda *one: seen.append(one))
    assert [one for one in seen if one[0] == "requests"][-1] == ("requests", 2, 2)
