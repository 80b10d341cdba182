"""The kit of grammars is tested: a list of literal texts passes, and each check has a grammar that fails only that."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pluglm.kernel.errors import RequestError
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.sampling_params import GrammarSpec
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.grammar import grammar_checks

Mask = npt.NDArray[np.int32]


class LiteralMatcher:
    """Follows one of some literal texts, token by token. Methods are what the fixtures break."""

    def __init__(self, texts: list[str], tokens: dict[int, str], eos: int, num_words: int) -> None:
        self.texts, self.tokens, self.eos, self.num_words = texts, tokens, eos, num_words
        self.accepted: list[int] = []

    @property
    def terminated(self) -> bool:
        return self.eos in self.accepted

    @property
    def prefix(self) -> str:
        return "".join(self.tokens.get(token, "") for token in self.accepted)

    def allows(self, token: int) -> bool:
        if self.terminated:
            return False
        if token == self.eos:
            return self.prefix in self.texts
        text = self.tokens.get(token)
        return text is not None and any(one.startswith(self.prefix + text) for one in self.texts)

    def fill_mask(self, mask_W: Mask) -> None:
        mask_W[:] = 0
        for token in [*self.tokens, self.eos]:
            if self.allows(token):
                mask_W.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token_id: int) -> bool:
        if not self.allows(token_id):
            return False
        self.accepted.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > len(self.accepted):
            raise ValueError("fewer tokens were accepted")
        del self.accepted[len(self.accepted) - num_tokens :]

    def forced(self) -> list[int]:
        allowed = [token for token in [*self.tokens, self.eos] if self.allows(token)]
        return allowed if len(allowed) == 1 else []


class LiteralGrammar:
    """Knows regexes that are alternatives of literal texts in parentheses."""

    interface_version = 1
    Config = ComponentConfig
    Matcher: type[LiteralMatcher] = LiteralMatcher

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        tokenizer = context.tokenizer
        texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
        self.tokens = {token: text for token, text in texts.items() if text.isascii() and text}
        self.eos, self.num_words = min(context.eos_token_ids), -(-context.spec.vocab_size // 32)

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def compile(self, spec: GrammarSpec) -> LiteralMatcher:
        if spec.kind != "regex":
            raise RequestError(f"grammar kind '{spec.kind}' is unknown; use regex")
        return self.Matcher(self.texts(spec.value), self.tokens, self.eos, self.num_words)

    def texts(self, value: Any) -> list[str]:
        if not isinstance(value, str) or not (value.startswith("(") and value.endswith(")")):
            raise RequestError(f"regex {value!r} is not a list of texts in parentheses")
        return value[1:-1].split("|")


def matches(**methods: Any) -> type[LiteralGrammar]:
    """LiteralGrammar with other methods in its matchers."""
    return type("Broken", (LiteralGrammar,), {"Matcher": type("BrokenMatcher", (LiteralMatcher,), methods)})


class ForgetsTheLast(LiteralGrammar):
    def texts(self, value: Any) -> list[str]:
        return super().texts(value)[:-1]


class AddsOne(LiteralGrammar):
    def texts(self, value: Any) -> list[str]:
        return [*super().texts(value), "nope"]


class SharesMatchers(LiteralGrammar):
    def compile(self, spec: GrammarSpec) -> LiteralMatcher:
        """Hands out an unused matcher again."""
        unused = getattr(self, "matcher", None)
        self.matcher = unused if unused and not unused.accepted else super().compile(spec)
        return self.matcher


class AnyKind(LiteralGrammar):
    def compile(self, spec: GrammarSpec) -> LiteralMatcher:
        known = spec.kind == "regex"
        return super().compile(spec if known else GrammarSpec(kind="regex", value=f"({spec.value})"))


class RaisesTypeErrors(LiteralGrammar):
    def texts(self, value: Any) -> list[str]:
        if not isinstance(value, str):
            raise TypeError("not a string")
        return super().texts(value)


def closes_single_letters(self: LiteralMatcher, mask_W: Mask) -> None:
    LiteralMatcher.fill_mask(self, mask_W)
    letter = next(token for token, text in self.tokens.items() if text == "t")
    mask_W.view(np.uint32)[letter // 32] &= np.uint32(~(1 << letter % 32) & 0xFFFFFFFF)


def refuses_for_good(self: LiteralMatcher, token_id: int) -> bool:
    taken = LiteralMatcher.accept(self, token_id)
    if not taken and len(self.accepted) == 1:
        self.texts = []
    return taken


def keeps_the_first(self: LiteralMatcher, num_tokens: int) -> None:
    LiteralMatcher.rollback(self, num_tokens - 1 if num_tokens == len(self.accepted) else num_tokens)


def rolls_back_what_there_is(self: LiteralMatcher, num_tokens: int) -> None:
    del self.accepted[max(0, len(self.accepted) - num_tokens) :]


def never_terminated(self: LiteralMatcher) -> bool:
    """The state that is shown; `allows` reads the tokens."""
    return False


def allows_by_tokens(self: LiteralMatcher, token: int) -> bool:
    ended = self.eos in self.accepted
    return not ended and LiteralMatcher.allows(self, token)


def loses_the_last_letter(self: LiteralMatcher, num_tokens: int) -> None:
    ended = self.terminated
    LiteralMatcher.rollback(self, num_tokens)
    if ended:
        self.texts = [text + "." for text in self.texts]


def may_end_twice(self: LiteralMatcher, token: int) -> bool:
    return (token == self.eos and self.terminated) or LiteralMatcher.allows(self, token)


def may_end_at_once(self: LiteralMatcher, token: int) -> bool:
    return (token == self.eos and not self.accepted) or LiteralMatcher.allows(self, token)


def adds_to_the_row(self: LiteralMatcher, mask_W: Mask) -> None:
    before = mask_W.copy()
    LiteralMatcher.fill_mask(self, mask_W)
    mask_W[-1] |= before[-1]


def opens_the_padding(self: LiteralMatcher, mask_W: Mask) -> None:
    LiteralMatcher.fill_mask(self, mask_W)
    mask_W[-1] |= 0 if self.accepted else 1 << 5


def opens_and_takes_the_padding(self: LiteralMatcher, token_id: int) -> bool:
    return (token_id == 293 and not self.accepted) or LiteralMatcher.accept(self, token_id)


def fills_once(self: LiteralMatcher, mask_W: Mask) -> None:
    LiteralMatcher.fill_mask(self, mask_W)
    if getattr(self, "filled", None) == self.accepted:
        mask_W[:] = 0
    self.filled = list(self.accepted)


def advances_on_a_second_look(self: LiteralMatcher) -> list[int]:
    found = LiteralMatcher.forced(self)
    if getattr(self, "looked", False):
        return []
    self.looked = True
    return found


def hopes(self: LiteralMatcher) -> list[int]:
    allowed = [token for token in self.tokens if self.allows(token)]
    return allowed[:1]


BROKEN: dict[str, type[LiteralGrammar]] = {
    "matching_texts_are_accepted": ForgetsTheLast,
    "other_texts_are_refused": AddsOne,
    "mask_says_what_accept_takes": matches(fill_mask=closes_single_letters),
    "refused_tokens_change_nothing": matches(accept=refuses_for_good),
    "rollback_equals_never": matches(rollback=keeps_the_first),
    "rollback_past_the_start_raises": matches(rollback=rolls_back_what_there_is),
    "the_end_terminates": matches(terminated=property(never_terminated), allows=allows_by_tokens),
    "the_end_can_be_undone": matches(rollback=loses_the_last_letter),
    "terminated_allows_nothing": matches(allows=may_end_twice),
    "the_end_comes_only_at_the_end": matches(allows=may_end_at_once),
    "matchers_share_nothing": SharesMatchers,
    "fill_mask_overwrites_every_word": matches(fill_mask=adds_to_the_row),
    "ids_past_the_tokenizer_stay_closed": matches(fill_mask=opens_the_padding, accept=opens_and_takes_the_padding),
    "fill_mask_changes_nothing": matches(fill_mask=fills_once),
    "forced_changes_nothing": matches(forced=advances_on_a_second_look),
    "forced_tokens_are_certain": matches(forced=hopes),
    "unknown_kinds_are_refused": AnyKind,
    "bad_specs_are_refused": RaisesTypeErrors,
}


def test_a_plain_grammar_passes() -> None:
    report = run_checks(grammar_checks(LiteralGrammar))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in grammar_checks(LiteralGrammar)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_grammar_fails_exactly_its_check(name: str) -> None:
    report = run_checks(grammar_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
