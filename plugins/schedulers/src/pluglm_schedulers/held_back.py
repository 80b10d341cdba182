"""Prompts that go on alike: which waiting request would compute what another one computes now. Knows keys, no cache."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pluglm.kernel.core import RequestView, StepView


class SharedPrompts:
    """Two prompts go on alike when they have equal num_tokens tokens after equally long cached prefixes.

    Once one of them is computed, the other can adopt what they share. Memory: one entry for each prompt that runs.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._first: dict[Hashable, int] = {}  # how a prompt goes on -> the sequence that was let in to compute it

    def planning(self, view: StepView) -> None:
        """Called with the view of every step: whoever was let in counts as long as its prompt runs."""
        if self._first:
            prompts = {one.sequence_id for one in view.running if one.num_known - one.num_computed > 1}
            self._first = {rest: one for rest, one in self._first.items() if one in prompts}

    def let_in(self, request: RequestView, num_cached: int) -> None:
        if (rest := self._rest(request, num_cached)) is not None:
            self._first.setdefault(rest, request.sequence_id)

    def is_being_computed(self, request: RequestView, num_cached: int) -> bool:
        """Whether another sequence computes what this one would begin with."""
        rest = self._rest(request, num_cached)
        return rest is not None and self._first.get(rest, request.sequence_id) != request.sequence_id

    def _rest(self, request: RequestView, num_cached: int) -> Hashable | None:
        """None when too few tokens follow, or none may be adopted."""
        key, stop = request.cache_key, num_cached + self._num_tokens
        if key is None or not self._num_tokens or stop > key.limit:
            return None
        return key.namespace, num_cached, tuple(key.token_ids[num_cached:stop])
