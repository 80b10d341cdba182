"""The universal drafter: texts between two tokenizers, and a draft model with ids of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluglm.testing.check import Check, cases
from pluglm.testing.context import make_context
from pluglm.testing.drafter import draft_request, drafter_checks, ids_of
from pluglm.testing.runner import build_runner
from pluglm.testing.tokenizers import TinyTokenizer
from pluglm_spec_decode.reencoding import Reencoder
from pluglm_spec_decode.universal import UniversalConfig, UniversalDrafter

TINY = TinyTokenizer()


class Letters:
    """One id for each code point below 128, shifted by 3, and 2 for any other; 0 begins every text and 1 ends it."""

    vocab_size = 131
    eos_token_ids = frozenset({1})

    def encode(self, text: str) -> list[int]:
        return [0, *(ord(letter) + 3 if ord(letter) < 128 else 2 for letter in text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(one - 3) if one > 2 else "\ufffd" for one in token_ids if one > 1)

    def to_json(self) -> str:
        return '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}'


ASCII = st.text(st.characters(max_codepoint=127), max_size=40)


@given(ASCII, ASCII.filter(bool))
def test_what_is_said_comes_back_in_the_targets_ids(text, said):
    """The joined text is what target and proposal decode to; the target's own encoding of it wherever that fits."""
    reencoder, letters = Reencoder(TINY, Letters()), Letters()
    target_ids = TINY.encode(text)
    draft_ids = reencoder.to_draft(target_ids)
    assert draft_ids == letters.encode(text)
    found = reencoder.to_target(target_ids, draft_ids, letters.encode(said)[1:])
    assert TINY.decode([*target_ids, *found]) == text + said
    whole = TINY.encode(text + said)
    if whole[: len(target_ids)] == target_ids:
        assert found == whole[len(target_ids) :]


@given(ASCII, ASCII.filter(bool))
def test_the_other_way_round_a_first_token_is_not_repeated(text, said):
    reencoder, letters = Reencoder(Letters(), TINY), Letters()
    target_ids = letters.encode(text)
    found = reencoder.to_target(target_ids, reencoder.to_draft(target_ids), TINY.encode(said))
    assert found == letters.encode(said)[1:]


def test_the_end_of_a_text_ends_the_proposal():
    reencoder = Reencoder(TINY, Letters())
    target_ids = TINY.encode("ab")
    drafts = [ord("c") + 3, 1, ord("d") + 3]
    assert reencoder.to_target(target_ids, reencoder.to_draft(target_ids), drafts) == TINY.encode("c")
    assert reencoder.to_target(target_ids, reencoder.to_draft(target_ids), [1]) == []


def test_part_of_a_character_is_not_proposed():
    reencoder = Reencoder(Letters(), TINY)
    target_ids = Letters().encode("ab")
    drafts = TINY.encode("c\u00e9")[:-1]
    assert reencoder.to_target(target_ids, TINY.encode("ab"), drafts) == [ord("c") + 3]


class Spelling:
    """A runner's stand-in that goes on with the alphabet, in the ids of Letters: whatever the text, its next letter."""

    def __init__(self, inner):
        self.inner, self.spec, self.kv, self.fed = inner, replace(inner.spec, vocab_size=131), inner.kv, []

    def make_input(self, chunks):
        self.fed.append([list(chunk.token_ids) for chunk in chunks])
        self.last = [chunk.token_ids[-1] for chunk in chunks]
        return self.inner.make_input(chunks)

    def run(self, inputs):
        logits_RV = self.inner.run(inputs)[:, :131] * 0
        for row, last in enumerate(self.last):
            logits_RV[row, last + 1] = 1.0
        return logits_RV


def speller(num_tokens=4):
    runner = Spelling(build_runner("table")[0])
    context = make_context(build_runner=lambda model: (runner, Letters()))
    return UniversalDrafter(UniversalConfig(model="letters", num_tokens=num_tokens), context), runner


def test_another_vocabulary_is_no_hindrance():
    drafter, runner = speller()
    text = TINY.encode("say abc")
    assert ids_of(drafter.propose([draft_request(text, max_tokens=9)])) == [TINY.encode("defg")]
    assert runner.fed[0] == [Letters().encode("say abc")]


def test_kv_of_what_was_kept_is_not_computed_again():
    drafter, runner = speller()
    text = TINY.encode("say abc")
    drafter.propose([draft_request(text, max_tokens=9)])
    runner.fed.clear()
    committed = TINY.encode("dex")
    drafter.observe(0, 2, committed)
    assert ids_of(drafter.propose([draft_request(text + committed, max_tokens=9)])) == [TINY.encode("yz{|")]
    assert runner.fed[0] == [[ord("x") + 3]]


@pytest.mark.parametrize("text", ["abc", "aa", ""])
def test_a_text_of_equal_length_is_not_taken_for_the_one_before(text):
    """A sequence that lost its KV may come back as another text."""
    drafter, _ = speller()
    drafter.propose([draft_request(TINY.encode("xyz"), max_tokens=4)])
    drafter.release(0)
    other = TINY.encode(text)
    fresh, _ = speller()
    request = draft_request(other, max_tokens=4)
    assert ids_of(drafter.propose([request])) == ids_of(fresh.propose([request]))


@pytest.mark.parametrize("check", **cases(drafter_checks(UniversalDrafter, UniversalConfig(model="table"))))
def test_contract(check: Check) -> None:
    check.run()
