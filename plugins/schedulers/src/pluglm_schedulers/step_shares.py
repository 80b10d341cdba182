"""How the tokens of a step are shared: decodes ahead of prompts, and no prompt takes all while others want some.

Knows the views of one step and who found no KV before; the order of requests is a policy's and is given.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import accumulate, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from pluglm_schedulers.ranks import Rank

if TYPE_CHECKING:
    from pluglm.kernel.core import RequestView, StepView

_num_pending: Callable[[RequestView], int] = attrgetter("num_pending")


class StepShares:
    """Orders the running requests of a step and then says how many tokens each may take.

    A decode, which has one known token to compute, comes before every chunk of a prompt, and no decode's drafts take
    the token of another. Of the tokens that the decodes leave, a prompt may take `prompt_share`, and beyond that what
    those with a claim leave over: so nothing is wasted when it is alone, and they get the rest when it is not. As every
    prompt may take at least one token, claims hold nobody up for ever. In turn, only prompts that need more than one
    step are held to it: to spread those that could be done at once would delay them all.

    Those that wait have claims as far as seats are free. One that found no KV has none, nor has anyone behind it, until
    one of those that ran then is gone: it could not start. A cached prefix, unknown here, counts as tokens to compute.
    """

    def __init__(self, prompt_share: float = 0.5) -> None:
        self._prompt_share = prompt_share
        self._left = 1  # tokens that the decodes of this step leave
        self._part = 1  # those of them that a prompt may take whatever others claim
        self._claims: dict[int, int] = {}  # sequence id -> tokens that others claim before it takes more
        self._blocked: tuple[int, int] | None = None  # step and sequence id
        self._holders: frozenset[int] = frozenset()  # those that ran then

    def in_turn(self, view: StepView, ranked: Iterable[RequestView]) -> list[int]:
        """Running ids, decodes first, else as ranked. A long prompt leaves tokens to all prompts behind it."""
        decodes, prompts = self._split(view, ranked)
        if prompts and self._prompt_share < 1:
            self._claim(prompts, sum(map(_num_pending, self._startable(view, view.waiting))))
        return [one.sequence_id for one in (*decodes, *prompts)]

    def by_rank(self, view: StepView, rank: Rank) -> list[int]:
        """Running ids, decodes first, else by rank. A prompt leaves tokens only to those that wait and rank before."""
        decodes, prompts = self._split(view, sorted(view.running, key=rank))
        free_seats = view.budget.num_seats - len(view.running)
        if prompts and free_seats > 0:
            waiting = self._startable(view, nsmallest(free_seats, filter(_num_pending, view.waiting), key=rank))
            ranks, claims = [rank(one) for one in waiting], [0, *accumulate(map(_num_pending, waiting))]
            self._claims |= {one.sequence_id: claims[bisect_left(ranks, rank(one))] for one in prompts}
        return [one.sequence_id for one in (*decodes, *prompts)]

    def queue(self, view: StepView, ranked: Sequence[RequestView]) -> Iterator[int]:
        """Waiting ids as ranked. Those that may start leave tokens to each other as running prompts do."""
        if self._prompt_share < 1:
            self._claim(self._startable(view, ranked), 0)
        return (one.sequence_id for one in ranked)

    def share(self, request: RequestView, tokens_left: int) -> int:
        """Tokens for a request of the view that was ordered last."""
        least = 1 if _is_decode(request) else self._part
        return min(tokens_left, max(least, tokens_left - self._claims.get(request.sequence_id, 0)))

    def checkpoint(self) -> Callable[[], None]:
        """What puts everything back as it is now."""
        saved = self._left, self._part, dict(self._claims), self._blocked, self._holders

        def restore() -> None:
            self._left, self._part, self._claims, self._blocked, self._holders = saved

        return restore

    def blocked(self, view: StepView, request: RequestView) -> None:
        """A waiting request found no KV and holds back all behind it."""
        self._blocked = view.step, request.sequence_id
        self._holders = frozenset(one.sequence_id for one in view.running)

    def _split(self, view: StepView, ranked: Iterable[RequestView]) -> tuple[list[RequestView], list[RequestView]]:
        """Decodes and prompts; notes what decodes claim from each other when their drafts exceed the budget."""
        decodes: list[RequestView] = []
        prompts: list[RequestView] = []
        for one in ranked:
            (decodes if _is_decode(one) else prompts).append(one)
        self._left = view.budget.num_tokens - sum(map(_num_pending, decodes))
        self._part = max(1, math.ceil(self._prompt_share * self._left))
        self._claims = {}
        if self._left < 0:
            self._claims = {one.sequence_id: index for index, one in enumerate(reversed(decodes))}
        return decodes, prompts

    def _claim(self, prompts: Sequence[RequestView], claim: int) -> None:
        for one in reversed(prompts):
            if (num_pending := _num_pending(one)) > self._left:
                self._claims[one.sequence_id] = claim
            claim += num_pending

    def _startable(self, view: StepView, ranked: Iterable[RequestView]) -> list[RequestView]:
        """The first of those that wait, one for each free seat, up to one that cannot have found KV yet."""
        free_seats = view.budget.num_seats - len(view.running)
        if free_seats <= 0:
            return []
        found = list(islice(filter(_num_pending, ranked), free_seats))
        if self._blocked is not None and self._blocked[0] != view.step:
            if not self._holders.issubset(one.sequence_id for one in view.running):
                self._blocked = None
            elif self._blocked[1] in (ids := [one.sequence_id for one in found]):
                return found[: ids.index(self._blocked[1])]
        return found


def _is_decode(request: RequestView) -> bool:
    return request.num_known - request.num_computed <= 1
