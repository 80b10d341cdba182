"""The part of the drafter kit about what is lent: a full KV pool, hidden states that begin behind an adopted prefix.

Drafters that ask their target for nothing pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from pluglm.kernel.interfaces.drafter import Drafter
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.drafter_requests import MAX_TOKENS, TEXTS, ask
from pluglm.testing.target import ToldDrafter

Make = Callable[[], ToldDrafter]
STARTS = (1, 4, 7)  # of hidden states: in each text, and at its end, where there are none yet


def target_checks(make: Make, *, adapts: bool, shares: bool) -> Iterator[Check]:
    """make: a fresh drafter. adapts, shares: it has the tag ADAPTS, SHARES."""
    if not shares:
        yield make_check(a_full_pool_costs_others_nothing, make)
    yield make_check(want_of_room_leaves_no_trace, make, adapts)
    yield make_check(late_states_leave_no_trace, make, adapts)


def a_full_pool_costs_others_nothing(make: Make) -> None:
    """Those that `room` gives are drafted for as if they were alone, and the call does not fail without any."""
    if not make().target.num_layers:
        return
    alone = [ask(make(), text, place=place)[0] for place, text in enumerate(TEXTS)]
    everyone = frozenset(range(len(TEXTS)))
    for without_room in (frozenset({0}), frozenset({1, 3}), everyone):
        drafter = make()
        drafter.target.without_room = without_room
        found = ask(drafter, *TEXTS)
        for place in everyone - without_room:
            where = f"the proposal of sequence {place} alone, {alone[place]}, while {sorted(without_room)} have no room"
            expect(found[place] == alone[place], where, found[place])


def want_of_room_leaves_no_trace(make: Make, adapts: bool) -> None:
    """Once the pool has room again, a sequence is drafted for as by a new drafter."""
    if not make().target.num_layers:
        return
    for text in TEXTS:
        drafter = make()
        drafter.target.without_room = frozenset({0})
        ask(drafter, text)
        drafter.observe(0, 0, [250])
        drafter.target.without_room = frozenset()
        longer = [*text, 250]
        _expect_alike(ask(drafter, longer)[0], ask(make(), longer)[0], f"a step without room for {text}", adapts)


def late_states_leave_no_trace(make: Make, adapts: bool) -> None:
    """Where the first hidden states are missing, all is as with them: the next proposal is that of a new drafter."""
    if not make().target.keeps_hidden:
        return
    for start in STARTS:
        for where, found, fresh in after_outcomes(partial(_late, make, start)):
            _expect_alike(found, fresh, f"{where}, with hidden states from position {start}", adapts)


def after_outcomes(make: Callable[[], Drafter]) -> Iterator[tuple[str, list[int], list[int]]]:
    """What is proposed after some drafts were accepted, and by a new drafter for the same text."""
    for text in TEXTS:
        for num_accepted in range(MAX_TOKENS + 1):
            drafter = make()
            drafts = ask(drafter, text)[0][:num_accepted]
            committed = [*drafts, 250]
            drafter.observe(0, len(drafts), committed)
            where = f"{len(drafts)} of {text}'s drafts were accepted"
            yield where, ask(drafter, text + committed)[0], ask(make(), text + committed)[0]


def _late(make: Make, start: int) -> ToldDrafter:
    drafter = make()
    drafter.target.skip(0, start)
    return drafter


def _expect_alike(found: list[int], fresh: list[int], where: str, adapts: bool) -> None:
    """Equal, but for the length where that may depend on what happened before."""
    num = min(len(found), len(fresh)) if adapts else max(len(found), len(fresh))
    expect(found[:num] == fresh[:num], f"what a new drafter proposes, {fresh}, after {where}", found)
