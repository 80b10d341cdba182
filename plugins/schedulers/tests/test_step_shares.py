"""How a step's tokens are shared: closed examples, each budget worked out by hand in the test."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.kernel.core import Budget, RequestView, StepView
from pluglm_schedulers.ranks import arrival
from pluglm_schedulers.step_shares import StepShares


def request(sequence_id: int, known: int, computed: int = 0, drafts: int = 0) -> RequestView:
    """Arrives in the order of its id. A decode when all but one of the known tokens are computed."""
    return RequestView(
        sequence_id=sequence_id, request_id=f"r{sequence_id}", tenant="", priority=0, arrival_s=float(sequence_id),
        num_prompt=known, num_known=known, num_computed=computed, num_drafts=drafts, num_output=0, max_new_tokens=8,
        num_preemptions=0,
    )  # fmt: skip


def step(
    running: list[RequestView], waiting: list[RequestView], tokens: int = 24, seats: int = 8, number: int = 1
) -> StepView:
    budget = Budget(num_tokens=tokens, num_seats=seats)
    return StepView(step=number, now_s=1.0, budget=budget, running=tuple(running), waiting=tuple(waiting))


def given_out(shares: StepShares, view: StepView, order: list[int], left: int | None = None) -> dict[int, int]:
    """Tokens for each in that order, clipped to what is pending and left, as the kernel's planner does."""
    requests = {one.sequence_id: one for one in (*view.running, *view.waiting)}
    left = view.budget.num_tokens if left is None else left
    found = {}
    for one in order:
        found[one] = min(shares.share(requests[one], left), requests[one].num_pending, left)
        left -= found[one]
    return found


def in_turn(view: StepView, prompt_share: float = 0.5, shares: StepShares | None = None) -> dict[int, int]:
    """First those that run, then those that wait, by arrival."""
    shares = shares or StepShares(prompt_share)
    found = given_out(shares, view, shares.in_turn(view, sorted(view.running, key=arrival)))
    waiting = list(shares.queue(view, view.waiting))
    return found | given_out(shares, view, waiting, view.budget.num_tokens - sum(found.values()))


def test_decodes_come_first_each_group_in_the_order_given() -> None:
    running = [request(1, 100, 40), request(2, 9, 8), request(3, 50, 10), request(4, 7, 6)]
    view = step(running, [])
    assert StepShares().in_turn(view, running) == [2, 4, 1, 3]
    assert StepShares().in_turn(view, running[::-1]) == [4, 2, 3, 1]
    assert StepShares().by_rank(view, lambda one: -one.sequence_id) == [4, 2, 3, 1]


def test_no_decode_gives_its_token_for_the_drafts_of_another() -> None:
    """Six tokens for four decodes with 3 drafts each: 1 + 2 drafts, and one for each of the others."""
    running = [request(one, 9, 8, drafts=3) for one in range(4)]
    assert in_turn(step(running, [], tokens=6)) == {0: 3, 1: 1, 2: 1, 3: 1}
    assert in_turn(step(running, [], tokens=17)) == {0: 4, 1: 4, 2: 4, 3: 4}


def test_long_prompt_takes_half_of_what_decodes_leave_while_another_wants_tokens() -> None:
    decodes = [request(one, 9, 8) for one in range(4)]
    view = step([*decodes, request(4, 200, 40)], [request(5, 300)])
    assert in_turn(view) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 10, 5: 10}
    assert in_turn(view, prompt_share=0.2) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 4, 5: 16}


def test_nothing_is_wasted_when_a_prompt_is_alone_or_the_others_want_less() -> None:
    long = request(1, 200, 40)
    assert in_turn(step([long], [])) == {1: 24}
    assert in_turn(step([long], [request(2, 5)])) == {1: 19, 2: 5}
    assert in_turn(step([long, request(2, 30, 25)], [request(3, 4)])) == {1: 15, 2: 5, 3: 4}


def test_share_of_one_is_first_come_first_served() -> None:
    assert in_turn(step([request(1, 200, 40)], [request(2, 5)]), prompt_share=1) == {1: 24, 2: 0}


def test_prompts_that_one_step_can_finish_are_served_one_after_another() -> None:
    """Spread over both steps, the first would be done later and the second no earlier."""
    assert in_turn(step([request(1, 40, 20), request(2, 40, 20)], [])) == {1: 20, 2: 4}
    assert in_turn(step([], [request(1, 20), request(2, 20)])) == {1: 20, 2: 4}


def test_prompts_that_start_together_share_too() -> None:
    assert in_turn(step([], [request(1, 200), request(2, 5), request(3, 300)])) == {1: 12, 2: 5, 3: 7}


def test_those_without_a_free_seat_claim_nothing() -> None:
    view = step([request(1, 200, 40), request(2, 9, 8)], [request(3, 50)], seats=2)
    assert in_turn(view) == {2: 1, 1: 23, 3: 0}
    assert in_turn(step(view.running and list(view.running), [request(3, 5), request(4, 50)], seats=3))[1] == 18


def test_those_that_wait_with_nothing_to_compute_take_no_seat_from_others() -> None:
    view = step([request(1, 200, 40)], [request(2, 9, 9), request(3, 5)], seats=2)
    assert in_turn(view) == {1: 19, 2: 0, 3: 5}


def test_one_that_found_no_kv_claims_nothing_until_somebody_who_ran_is_gone() -> None:
    shares, long, other, big = StepShares(), request(1, 200, 40), request(2, 9, 8), request(3, 50)
    first = step([long, other], [big, request(4, 50)])
    assert in_turn(first, shares=shares)[1] == 12
    shares.blocked(first, big)
    assert in_turn(first, shares=shares)[1] == 12  # asked again about the same step
    assert in_turn(step([long, other], [big, request(4, 50)], number=2), shares=shares)[1] == 23
    assert in_turn(step([long, other], [request(0, 7), big], number=3), shares=shares)[1] == 16  # 0 is ahead of it
    assert in_turn(step([long], [big], number=4), shares=shares)[1] == 12


def test_by_rank_a_prompt_leaves_tokens_only_to_those_that_wait_ahead_of_it() -> None:
    """Rank is the id. 5 leaves half to 2; 1 is ahead of everybody and takes what it can."""
    view = step([request(5, 200, 40)], [request(2, 300), request(9, 300)])
    shares = StepShares()
    order = shares.by_rank(view, lambda one: one.sequence_id)
    assert given_out(shares, view, [*order, 2, 9]) == {5: 12, 2: 12, 9: 0}
    view = step([request(5, 200, 40), request(1, 200, 60)], [request(2, 300)])
    order = shares.by_rank(view, lambda one: one.sequence_id)
    assert order == [1, 5]
    assert given_out(shares, view, order) == {1: 24, 5: 0}


PROMPTS = st.lists(st.tuples(st.integers(2, 60), st.booleans()), min_size=1, max_size=7)


@settings(max_examples=200, deadline=None)
@given(PROMPTS, st.integers(0, 4), st.integers(8, 64), st.sampled_from([0.1, 0.5, 0.8, 1.0]))
def test_all_tokens_are_used_and_those_behind_the_first_prompt_get_their_part(
    prompts: list[tuple[int, bool]], num_decodes: int, tokens: int, share: float
) -> None:
    decodes = [request(one, 9, 8) for one in range(num_decodes)]
    views = [request(10 + index, size, 0) for index, (size, _) in enumerate(prompts)]
    running = [one for one, (_, runs) in zip(views, prompts, strict=True) if runs]
    waiting = [one for one, (_, runs) in zip(views, prompts, strict=True) if not runs]
    found = in_turn(step([*decodes, *running], waiting, tokens=tokens, seats=16), share)
    left, wanted = tokens - num_decodes, sum(one.num_pending for one in views)
    served = {one.sequence_id: found[one.sequence_id] for one in views}
    assert [found[one.sequence_id] for one in decodes] == [1] * num_decodes
    assert sum(served.values()) == min(left, wanted)  # nothing is wasted
    first = (running + waiting)[0]
    others = wanted - first.num_pending
    if first.num_pending > left:
        assert sum(served.values()) - served[first.sequence_id] >= min(others, int((1 - share) * left))
