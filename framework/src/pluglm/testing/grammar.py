"""The contract kit of grammars: matchers as state machines over tokens. Knows one small language, by its texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pluglm.kernel.errors import RequestError
from pluglm.kernel.interfaces.grammar import Grammar, Matcher
from pluglm.kernel.sampling_params import GrammarSpec
from pluglm.testing.check import Check, expect, expect_raises, make_check
from pluglm.testing.common import common_checks
from pluglm.testing.context import make_context

# V: vocabulary, W: words of a mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """A spec with texts that match it whole and texts that do not. The longest match begins no other one."""

    spec: GrammarSpec = field(default_factory=lambda: GrammarSpec(kind="regex", value="(yes then|no|now)"))
    matches: tuple[str, ...] = ("yes then", "no", "now")
    others: tuple[str, ...] = ("nope", "maybe", "yes them", "y")
    bad_specs: tuple[GrammarSpec, ...] = field(
        default_factory=lambda: (GrammarSpec(kind="regex", value="(yes"), GrammarSpec(kind="regex", value=5))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """build: a fresh grammar component over the kit's tokenizer."""

    build: Callable[[], Grammar]
    language: Language
    vocab_size: int
    num_ids: int
    eos: int
    encode: Callable[[str], list[int]]

    def matcher(self, *token_ids: int) -> Matcher:
        """A matcher of a grammar of its own, after these tokens."""
        matcher = self.build().compile(self.language.spec)
        for token in token_ids:
            expect(matcher.accept(token), f"token {token} of a matching text to be accepted", False)
        return matcher

    def mask(self, matcher: Matcher, fill: int = 0) -> npt.NDArray[np.int32]:
        mask_W = np.full(-(-self.vocab_size // 32), fill, dtype=np.int32)
        matcher.fill_mask(mask_W)
        return mask_W

    def allowed(self, matcher: Matcher) -> list[int]:
        mask_W = self.mask(matcher)
        return [token for token in range(self.vocab_size) if int(mask_W[token // 32]) >> (token % 32) & 1]

    @property
    def text(self) -> list[int]:
        """Tokens of the longest match."""
        return self.encode(max(self.language.matches, key=len))


def grammar_checks(cls: type[Any], config: Any = None, language: Language | None = None) -> Iterator[Check]:
    """Every check of a grammar class. language: for grammars that do not know the kind `regex`."""
    config, context = cls.Config() if config is None else config, make_context()

    def build() -> Grammar:
        grammar: Grammar = cls(config, context)
        return grammar

    subject = Subject(
        build=build,
        language=language or Language(),
        vocab_size=context.spec.vocab_size,
        num_ids=context.tokenizer.vocab_size,
        eos=min(context.eos_token_ids),
        encode=context.tokenizer.encode,
    )
    yield from common_checks("grammar", cls, config, build)
    for function in ALWAYS:
        yield make_check(function, subject)


def _accepts(subject: Subject, text: str) -> bool:
    matcher = subject.build().compile(subject.language.spec)
    return all(matcher.accept(token) for token in [*subject.encode(text), subject.eos])


def matching_texts_are_accepted(subject: Subject) -> None:
    for text in subject.language.matches:
        expect(_accepts(subject, text), f"'{text}' and the end token to be accepted", "a refusal")


def other_texts_are_refused(subject: Subject) -> None:
    for text in subject.language.others:
        expect(not _accepts(subject, text), f"'{text}' or the end after it to be refused", "acceptance")


def mask_says_what_accept_takes(subject: Subject) -> None:
    """At every point of a text, for every id below the number of logits."""
    grammar = subject.build()
    for length in range(len(subject.text) + 1):
        allowed = set(subject.allowed(subject.matcher(*subject.text[:length])))
        for token in range(subject.vocab_size):
            matcher = grammar.compile(subject.language.spec)
            for before in subject.text[:length]:
                matcher.accept(before)
            taken = matcher.accept(token)
            expect(taken == (token in allowed), f"accept({token}) = {token in allowed}, as the mask says", taken)


def refused_tokens_change_nothing(subject: Subject) -> None:
    matcher = subject.matcher(*subject.text[:1])
    before = subject.allowed(subject.matcher(*subject.text[:1]))
    refused = next(token for token in range(subject.vocab_size) if token not in before)
    expect(not matcher.accept(refused), f"token {refused} to be refused", "acceptance")
    after = subject.allowed(matcher)
    expect(after == before, f"the same allowed tokens after a refusal, {before}", after)


def rollback_equals_never(subject: Subject) -> None:
    text = subject.text
    for length in range(len(text)):
        matcher = subject.matcher(*text)
        matcher.rollback(len(text) - length)
        found, never = subject.allowed(matcher), subject.allowed(subject.matcher(*text[:length]))
        expect(found == never, f"the tokens allowed after {length} tokens, {never}", found)


def rollback_past_the_start_raises(subject: Subject) -> None:
    matcher = subject.matcher(*subject.text)
    with expect_raises(ValueError, "for a rollback of more tokens than were accepted"):
        matcher.rollback(len(subject.text) + 1)


def the_end_terminates(subject: Subject) -> None:
    matcher = subject.matcher(*subject.text)
    expect(matcher.terminated is False, "not terminated before the end token", matcher.terminated)
    expect(matcher.accept(subject.eos) and matcher.terminated is True, "terminated after it", matcher.terminated)


def the_end_can_be_undone(subject: Subject) -> None:
    matcher = subject.matcher(*subject.text, subject.eos)
    matcher.rollback(1)
    found, never = subject.allowed(matcher), subject.allowed(subject.matcher(*subject.text))
    expect(matcher.terminated is False, "not terminated after the end token was undone", matcher.terminated)
    expect(found == never, f"the tokens allowed before the end token, {never}", found)


def terminated_allows_nothing(subject: Subject) -> None:
    matcher = subject.matcher(*subject.text, subject.eos)
    expect(not subject.allowed(matcher), "no allowed tokens after the end", subject.allowed(matcher))
    taken = [token for token in (subject.eos, *subject.text) if matcher.accept(token)]
    expect(not taken, "no token accepted after the end", taken)


def the_end_comes_only_at_the_end(subject: Subject) -> None:
    whole = subject.allowed(subject.matcher(*subject.text))
    expect(subject.eos in whole, "the end token allowed after a whole text", whole)
    for length in range(len(subject.text)):
        before = subject.allowed(subject.matcher(*subject.text[:length]))
        expect(subject.eos not in before, f"no end token after {length} of {len(subject.text)} tokens", before)


def matchers_share_nothing(subject: Subject) -> None:
    grammar = subject.build()
    first, second = grammar.compile(subject.language.spec), grammar.compile(subject.language.spec)
    before = subject.allowed(subject.matcher())
    for token in [*subject.text, subject.eos]:
        first.accept(token)
    after = subject.allowed(second)
    expect(after == before, f"a matcher unmoved by another of the same spec, {before}", after)


def fill_mask_overwrites_every_word(subject: Subject) -> None:
    matcher = subject.matcher()
    clean, dirty = subject.mask(matcher, 0).tolist(), subject.mask(subject.matcher(), -1).tolist()
    expect(dirty == clean, f"the same words whatever the row held, {clean}", dirty)


def ids_past_the_tokenizer_stay_closed(subject: Subject) -> None:
    open_ids = [token for token in subject.allowed(subject.matcher()) if token >= subject.num_ids]
    expect(not open_ids, f"no allowed id from {subject.num_ids} on, where the tokenizer ends", open_ids)


def fill_mask_changes_nothing(subject: Subject) -> None:
    matcher = subject.matcher(*subject.text[:1])
    first, second = subject.allowed(matcher), subject.allowed(matcher)
    expect(first == second, f"the same mask twice, {first}", second)


def forced_changes_nothing(subject: Subject) -> None:
    matcher = subject.matcher(*subject.text[:1])
    before = subject.allowed(subject.matcher(*subject.text[:1]))
    first, second = matcher.forced(), matcher.forced()
    expect(first == second, f"the same forced tokens twice, {first}", second)
    after = subject.allowed(matcher)
    expect(after == before, f"the same allowed tokens after forced(), {before}", after)


def forced_tokens_are_certain(subject: Subject) -> None:
    """Each is the only token that the mask allows when its turn comes."""
    for length in range(len(subject.text) + 1):
        matcher = subject.matcher(*subject.text[:length])
        for token in matcher.forced():
            allowed = subject.allowed(matcher)
            expect(allowed == [token], f"only the forced token {token} allowed", allowed)
            matcher.accept(token)


def unknown_kinds_are_refused(subject: Subject) -> None:
    with expect_raises(RequestError, "for a spec of an unknown kind"):
        subject.build().compile(GrammarSpec(kind="no_such_kind_of_grammar", value="x"))


def bad_specs_are_refused(subject: Subject) -> None:
    for spec in subject.language.bad_specs:
        with expect_raises(RequestError, f"for the spec {spec!r}"):
            subject.build().compile(spec)


ALWAYS = (
    matching_texts_are_accepted,
    other_texts_are_refused,
    mask_says_what_accept_takes,
    refused_tokens_change_nothing,
    rollback_equals_never,
    rollback_past_the_start_raises,
    the_end_terminates,
    the_end_can_be_undone,
    terminated_allows_nothing,
    the_end_comes_only_at_the_end,
    matchers_share_nothing,
    fill_mask_overwrites_every_word,
    ids_past_the_tokenizer_stay_closed,
    fill_mask_changes_nothing,
    forced_changes_nothing,
    forced_tokens_are_certain,
    unknown_kinds_are_refused,
    bad_specs_are_refused,
)
