"""A suffix automaton of token texts that counts what followed what. Grows token by token; knows no requests.

The automaton is that of Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), for several
texts. Counting ends at contexts of max_context tokens, so a token costs a bounded number of steps whatever the texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROOT = 0
NOWHERE = -1


class Context(NamedTuple):
    """The last num_tokens tokens of a text, as a state of an automaton."""

    state: int
    num_tokens: int


class Continuation(NamedTuple):
    """token_ids: the likeliest way on. expected: how many of them come true, by the shares of earlier occurrences.

    first: the share of the first of them; 1 where every occurrence went on so, or nothing was found.
    """

    token_ids: list[int]
    expected: float
    first: float = 1.0


class Fork(NamedTuple):
    """Behind place tokens of a continuation another one, which comes there with this chance by earlier occurrences.

    context: with that token at its end.
    """

    place: int
    token_id: int
    chance: float
    context: Context


class SuffixAutomaton:
    """Every context of 1 to max_context tokens that occurs in the texts, how often, and what follows it most often.

    Texts are appended one after another; no context reaches from one into the next. States are numbered. A state stands
    for all strings that end at the same places: the longest has `_length` tokens, and each has more than the longest of
    the state that `_link` names.
    """

    def __init__(self, max_context: int) -> None:
        self._max_context = max_context
        self._length = [0]
        self._link = [NOWHERE]
        self._next: list[dict[int, int]] = [{}]
        self._count = [0]  # places where the state's strings end, of up to max_context + 1 tokens
        self._num_followed = [0]  # those of them behind which the text went on
        self._best = [NOWHERE]  # the token that followed most often; of equals, the one that did so last
        self.num_tokens = 0
        self.start_text()

    def start_text(self) -> None:
        """The next token is the first of a new text."""
        self._text = ROOT  # the state of the text so far
        self._tail = ROOT  # the state of its last max_context + 1 tokens

    def append(self, token_id: int) -> None:
        """At most 2 (max_context + 1) states are counted anew; the rest takes constant amortised time."""
        before = self._tail
        self._text = self._extended(self._text, token_id)
        self._tail = self._cut(self._next[before][token_id], self._max_context + 1)
        self.num_tokens += 1
        self._note_place(self._tail)
        self._note_follower(before, token_id)

    def own_context(self) -> Context:
        """The longest suffix of the present text that stands elsewhere too, with something behind it."""
        if self._tail == ROOT:
            return Context(ROOT, 0)
        state = self._cut(self._tail, self._max_context)
        return self._followed(state, min(self._length[state], self._max_context))

    def context_of(self, token_ids: Sequence[int]) -> Context:
        """The longest suffix of token_ids, a text of others, that stands in these texts with something behind it."""
        state = num_tokens = 0
        for token_id in token_ids[-self._max_context :]:
            while state != ROOT and token_id not in self._next[state]:
                state = self._link[state]
                num_tokens = self._length[state]
            if token_id in self._next[state]:
                state, num_tokens = self._next[state][token_id], num_tokens + 1
        return self._followed(state, num_tokens)

    def shorter(self, context: Context) -> Context:
        """The longest suffix of the context that stands at more places; empty, (0, 0), when there is none."""
        link = self._link[context.state]
        return Context(ROOT, 0) if link <= ROOT else self._followed(link, self._length[link])

    def continuation(self, context: Context, num_tokens: int, min_probability: float) -> Continuation:
        """What followed most often, then what followed that, up to num_tokens.

        Ends before the product of the shares falls below min_probability. A context that is longer than max_context, or
        that nothing followed yet, loses its oldest tokens.
        """
        token_ids, product, expected, first = list[int](), 1.0, 0.0, 1.0
        while len(token_ids) < num_tokens:
            context = self._followed(*context)
            if context.state == ROOT:
                break
            token_id = self._best[context.state]
            product *= self._share(context.state, token_id)
            if product < min_probability:
                break
            if not token_ids:
                first = product
            token_ids.append(token_id)
            expected += product
            context = self._with(context, token_id)
        return Continuation(token_ids, expected, first)

    def forks(self, context: Context, token_ids: Sequence[int], min_probability: float) -> Iterator[Fork]:
        """Other tokens than those of the context's continuation, at each place of it.

        A token counts as often as behind the longest suffix that it followed anywhere. None of a chance below
        min_probability.
        """
        product = 1.0
        for place, token_id in enumerate(token_ids):
            context = self._followed(*context)
            known, (state, length) = {token_id}, context
            while state != ROOT:
                for other in self._next[state].keys() - known:
                    chance = product * self._share(state, other)
                    if chance >= min_probability:
                        yield Fork(place, other, chance, self._with(Context(state, length), other))
                known |= self._next[state].keys()
                state, length = self._followed(self._link[state], self._length[self._link[state]])
            product *= self._share(context.state, token_id)
            context = self._with(context, token_id)

    def _share(self, state: int, token_id: int) -> float:
        """Of the places of a state's strings that something follows, those that this token does."""
        return self._count[self._next[state][token_id]] / self._num_followed[state]

    def _with(self, context: Context, token_id: int) -> Context:
        """One token longer, or as long if it would be longer than max_context."""
        state, length = self._next[context.state][token_id], context.num_tokens + 1
        if length > self._max_context:
            return Context(self._cut(state, self._max_context), self._max_context)
        return Context(state, length)

    def _extended(self, state: int, token_id: int) -> int:
        """The state of a text one token longer, made if there is none."""
        known = self._next[state].get(token_id)
        if known is not None:
            return self._exact(state, known, token_id)
        new = self._add(self._length[state] + 1, {}, ROOT)
        while state != NOWHERE and token_id not in self._next[state]:
            self._next[state][token_id] = new
            state = self._link[state]
        if state != NOWHERE:
            self._link[new] = self._exact(state, self._next[state][token_id], token_id)
        return new

    def _exact(self, state: int, following: int, token_id: int) -> int:
        """A state whose longest string is state's and token_id: `following`, or what is split off from it."""
        if self._length[following] == self._length[state] + 1:
            return following
        new = self._add(self._length[state] + 1, dict(self._next[following]), self._link[following])
        for counts in (self._count, self._num_followed, self._best):
            counts[new] = counts[following]
        self._link[following] = new
        while state != NOWHERE and self._next[state].get(token_id) == following:
            self._next[state][token_id] = new
            state = self._link[state]
        return new

    def _add(self, length: int, following: dict[int, int], link: int) -> int:
        self._length.append(length)
        self._next.append(following)
        self._link.append(link)
        self._count.append(0)
        self._num_followed.append(0)
        self._best.append(NOWHERE)
        return len(self._length) - 1

    def _cut(self, state: int, num_tokens: int) -> int:
        """The state of the last num_tokens tokens of a state's strings; of all of them, when they are not more."""
        while self._length[self._link[state]] >= num_tokens:
            state = self._link[state]
        return state

    def _followed(self, state: int, num_tokens: int) -> Context:
        """The same suffix if something stands behind it somewhere, else the longest shorter one."""
        while state != ROOT and not self._num_followed[state]:
            state = self._link[state]
            num_tokens = self._length[state]
        return Context(state, num_tokens)

    def _note_place(self, state: int) -> None:
        while state != ROOT:
            self._count[state] += 1
            state = self._link[state]

    def _note_follower(self, state: int, token_id: int) -> None:
        while state != ROOT:
            self._num_followed[state] += 1
            best, following = self._best[state], self._next[state]
            if best == NOWHERE or self._count[following[token_id]] >= self._count[following[best]]:
                self._best[state] = token_id
            state = self._link[state]
