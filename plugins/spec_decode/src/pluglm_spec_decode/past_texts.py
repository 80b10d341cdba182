"""Texts that were finished before, in suffix automata, apart for each owner. Bounded: the oldest are forgotten."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pluglm_spec_decode.suffix_automaton import SuffixAutomaton

SHARE = 8  # a volume holds up to this part of all tokens, so that much is forgotten at once
OWN_TOKENS = 16  # what a volume itself counts as, so that many owners of little are bounded too
LEAST_TOKENS = OWN_TOKENS + 2  # the least whose eighth, with what its volume counts as, is no more than the whole


@dataclass(frozen=True, slots=True, eq=False)
class _Volume:
    """Texts of one owner, in the order they came. An automaton forgets nothing, so a volume is forgotten as a whole."""

    owner: Hashable
    automaton: SuffixAutomaton

    @property
    def num_tokens(self) -> int:
        return OWN_TOKENS + self.automaton.num_tokens


class PastTexts:
    """At most max_tokens of all owners together: 0, which keeps nothing, or LEAST_TOKENS and more.

    Of one text the last eighth of max_tokens is kept.
    """

    def __init__(self, max_tokens: int, max_context: int) -> None:
        self._max_tokens = max_tokens
        self._max_context = max_context
        self._volume_tokens = max_tokens // SHARE
        self._volumes: list[_Volume] = []  # by age

    @property
    def num_tokens(self) -> int:
        """What is held, volumes counted as OWN_TOKENS each."""
        return sum(volume.num_tokens for volume in self._volumes)

    def add(self, owner: Hashable, token_ids: Sequence[int]) -> None:
        """Of a text longer than a volume, its end is kept; what is oldest makes room."""
        token_ids = token_ids[-self._volume_tokens :] if self._volume_tokens else ()
        if not token_ids:
            return
        automaton = self._with_room(owner, len(token_ids))
        automaton.start_text()
        for token_id in token_ids:
            automaton.append(token_id)
        while self.num_tokens > self._max_tokens and len(self._volumes) > 1:
            del self._volumes[0]

    def automata(self, owner: Hashable) -> list[SuffixAutomaton]:
        """Those of an owner, the newest first."""
        return [volume.automaton for volume in reversed(self._volumes) if volume.owner == owner]

    def _with_room(self, owner: Hashable, num_tokens: int) -> SuffixAutomaton:
        newest = self.automata(owner)[:1]
        if newest and newest[0].num_tokens + num_tokens <= self._volume_tokens:
            return newest[0]
        automaton = SuffixAutomaton(self._max_context)
        self._volumes.append(_Volume(owner, automaton))
        return automaton
