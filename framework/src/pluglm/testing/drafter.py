"""The contract kit of drafters: proposals depend on the committed text of their own sequence, and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pluglm.kernel.interfaces.drafter import ADAPTS, ROWS, SHARES, BoundedDrafter, Drafter, DraftRequest
from pluglm.kernel.interfaces.services import Runner
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import common_checks, provides
from pluglm.testing.context import make_context, small_spec
from pluglm.testing.drafter_branches import branch_checks
from pluglm.testing.drafter_requests import MAX_TOKENS, TEXTS, ask, draft_request, ids_of
from pluglm.testing.drafter_rows import row_checks
from pluglm.testing.drafter_target import after_outcomes, target_checks
from pluglm.testing.target import TableTarget, ToldDrafter

__all__ = ["ask", "draft_request", "drafter_checks", "ids_of"]

Make = Callable[[], Drafter]
ROWS_WIDTH = 24  # of the target for the checks of rows, which need many draws for each token


def drafter_checks(
    cls: type[Any], config: Any = None, *, head: Callable[[str], Runner] | None = None, **context: Any
) -> Iterator[Check]:
    """Every check of a drafter class that its tags (ROWS, SHARES, ADAPTS) leave to be asked.

    context: fields of the BuildContext to use instead of the kit's. The kit's `build_runner` gives a model whose logits
    depend on every token that the drafter really stored, and so do the rows of its `target`, a TableTarget that refuses
    what a run refuses. head: what that gives to a drafter that asks for one.
    """
    config = cls.Config() if config is None else config

    def make(**fields: Any) -> ToldDrafter:
        run = make_context(**{"max_model_len": 256, **fields, **context})
        target = TableTarget(run.spec, head)
        return ToldDrafter(cls(config, replace(run, target=target)), target)

    yield from common_checks("drafter", cls, config, make)
    yield make_check(ids_are_the_targets, make, make_context(**context).spec.vocab_size)
    for function in ALWAYS:
        yield make_check(function, make)
    if isinstance(cls, BoundedDrafter):
        yield make_check(proposals_stay_below_the_bound, make, cls.most_tokens(config))
    adapts, shares = provides(cls, config, ADAPTS), provides(cls, config, SHARES)
    yield make_check(prefixes_after_outcomes if adapts else outcomes_leave_no_trace, make)
    yield from target_checks(make, adapts=adapts, shares=shares)
    yield from branch_checks(make, TEXTS, make_context(**context).spec.vocab_size)
    if not shares:
        for function in UNSHARED:
            yield make_check(function, make)
    if provides(cls, config, ROWS):
        spec = small_spec(ROWS_WIDTH)
        yield from row_checks(partial(make, spec=spec), context.get("spec", spec).vocab_size)


def proposals_fit_max_tokens(make: Make) -> None:
    for max_tokens in (1, 2, 7):
        lengths = [len(one) for one in ask(make(), *TEXTS, max_tokens=max_tokens)]
        expect(max(lengths) <= max_tokens, f"at most {max_tokens} ids", f"proposals of {lengths}")


def proposals_stay_below_the_bound(make: Make, most: int) -> None:
    """For texts that repeat themselves for long, and room for more."""
    expect(type(most) is int and most >= 0, "an int from 0 of most_tokens", repr(most))
    texts = [[*text, *text * (2 + most // len(text))] for text in TEXTS]
    lengths = [len(one) for one in ask(make(), *texts, max_tokens=most + 8)]
    expect(max(lengths) <= most, f"at most the {most} tokens that most_tokens states", f"proposals of {lengths}")


def no_room_means_no_proposal(make: Make) -> None:
    found = ask(make(), *TEXTS, max_tokens=0)
    expect(found == [[]] * len(TEXTS), "no ids when none may be proposed", found)


def ids_are_the_targets(make: Make, vocab_size: int) -> None:
    texts = [[token, 3, token, 3, token] for token in (0, 31, 200, 261)]
    ids = [one for proposal in ask(make(), *texts) for one in proposal]
    expect(all(isinstance(one, int) and 0 <= one < vocab_size for one in ids), f"ids below {vocab_size}", ids)


def one_proposal_a_request(make: Make) -> None:
    """In order, the empty ones included."""
    texts = [[17], TEXTS[0], [18, 19], TEXTS[1]]
    found = ask(make(), *texts)
    expect(len(found) == 4, "four proposals for four requests", found)
    alone = [ask(make(), text)[0] for text in texts]
    expect(found == alone, f"each request's own proposal, {alone}", found)


def proposing_twice_gives_the_same(make: Make) -> None:
    drafter = make()
    first, second = ask(drafter, *TEXTS), ask(drafter, *TEXTS)
    expect(first == second, f"equal proposals without an observe, {first}", second)


def requests_are_not_changed(make: Make) -> None:
    requests = [draft_request(text, sequence_id=place) for place, text in enumerate(TEXTS)]
    make().propose(requests)
    found = [request.token_ids for request in requests]
    expect(found == list(TEXTS), "the callers' token lists as given", found)


def short_texts_are_legal(make: Make) -> None:
    for text in ([], [5], [5, 5], [5, 6]):
        found = ask(make(), text)
        expect(len(found) == 1 and len(found[0]) <= MAX_TOKENS, f"a proposal for the text {text}", found)
    expect(make().propose([]) == [], "no proposals for no requests", "something else")


def release_may_come_twice(make: Make) -> None:
    drafter = make()
    ask(drafter, *TEXTS)
    for _ in range(2):
        drafter.release(1)
    ask(drafter, *TEXTS)


def released_ids_start_afresh(make: Make) -> None:
    drafter = make()
    ask(drafter, TEXTS[0], TEXTS[1])
    drafter.release(0)
    found, fresh = ask(drafter, TEXTS[2], TEXTS[1]), ask(make(), TEXTS[2], TEXTS[1])
    expect(found == fresh, f"what a new drafter proposes for a reused id, {fresh}", found)


def outcomes_leave_no_trace(make: Make) -> None:
    """Whatever was accepted, the next proposal is that of a new drafter given the committed text."""
    for where, found, fresh in after_outcomes(make):
        expect(found == fresh, f"{fresh} after {where}", found)


def prefixes_after_outcomes(make: Make) -> None:
    """The same, but for the length: what was accepted may make the next proposal longer or shorter."""
    for where, found, fresh in after_outcomes(make):
        num = min(len(found), len(fresh))
        expect(found[:num] == fresh[:num], f"a part of {fresh}, or more than it, after {where}", found)


def order_of_requests_does_not_matter(make: Make) -> None:
    backward = [draft_request(TEXTS[place], sequence_id=place) for place in reversed(range(len(TEXTS)))]
    found, expected = ids_of(make().propose(backward))[::-1], ask(make(), *TEXTS)
    expect(found == expected, f"the same proposals in reverse order, {expected}", found)


@dataclass(slots=True)
class _Life:
    """One sequence played with random outcomes of its own; log keeps every proposal."""

    sequence_id: int
    token_ids: list[int]
    steps_left: int
    generator: random.Random
    log: list[list[int]] = field(default_factory=list)

    def request(self) -> DraftRequest:
        return draft_request(self.token_ids, sequence_id=self.sequence_id)

    def take(self, drafter: Drafter, proposal: list[int]) -> None:
        self.log.append(list(proposal))
        accepted = proposal[: self.generator.randint(0, len(proposal))]
        committed = [*accepted, self.generator.choice((5, 6, 7, 40))]
        self.token_ids.extend(committed)
        drafter.observe(self.sequence_id, len(accepted), committed)
        self.steps_left -= 1
        preempted = self.generator.random() < 0.1
        if self.steps_left == 0 or preempted:
            drafter.release(self.sequence_id)


def _lives() -> list[_Life]:
    return [
        _Life(index, [*TEXTS[index % len(TEXTS)], index], 5 + index % 4, random.Random(index)) for index in range(7)
    ]


def sequences_do_not_mix(make: Make) -> None:
    """Seven sequences that join, wait, lose their KV and leave: each as if it were alone."""
    alone = _lives()
    for life in alone:
        drafter = make()
        while life.steps_left:
            life.take(drafter, drafter.propose([life.request()])[0].token_ids)
    together, drafter, generator = _lives(), make(), random.Random(99)
    while active := [life for life in together if life.steps_left]:
        batch = generator.sample(active, generator.randint(1, len(active)))
        proposals = ids_of(drafter.propose([life.request() for life in batch]))
        for life, proposal in zip(batch, proposals, strict=True):
            life.take(drafter, proposal)
    for one, other in zip(alone, together, strict=True):
        expect(one.log == other.log, f"sequence {one.sequence_id}'s proposals as alone, {one.log}", other.log)


ALWAYS = (
    proposals_fit_max_tokens,
    no_room_means_no_proposal,
    one_proposal_a_request,
    proposing_twice_gives_the_same,
    requests_are_not_changed,
    short_texts_are_legal,
    release_may_come_twice,
    order_of_requests_does_not_matter,
)
UNSHARED = (released_ids_start_afresh, sequences_do_not_mix)
