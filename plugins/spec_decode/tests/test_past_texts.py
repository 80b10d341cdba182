"""Past texts stay within their bound, apart for each owner, and the oldest go first."""

from __future__ import annotations

import random

from pluglm_spec_decode.past_texts import LEAST_TOKENS, OWN_TOKENS, PastTexts


def follows(past: PastTexts, owner: str, words: list[int]) -> list[int]:
    """What the owner's newest text with these words says next."""
    for automaton in past.automata(owner):
        context = automaton.context_of(words)
        if context.num_tokens == len(words):
            return automaton.continuation(context, 1, 0.0).token_ids
    return []


def test_owners_do_not_see_each_other():
    past = PastTexts(1000, 8)
    past.add("a", [1, 2, 3])
    past.add("b", [1, 2, 4])
    past.add("a", [5, 2, 3])
    assert follows(past, "a", [1, 2]) == [3]
    assert follows(past, "b", [1, 2]) == [4]
    assert follows(past, "c", [1, 2]) == []
    assert follows(past, "a", [5, 2]) == [3]
    assert follows(past, "b", [5, 2]) == []


def test_texts_of_one_owner_do_not_run_together():
    past = PastTexts(1000, 8)
    past.add("a", [1, 2])
    past.add("a", [3, 4])
    assert len(past.automata("a")) == 1
    assert follows(past, "a", [1]) == [2]
    assert follows(past, "a", [2]) == []


def test_the_oldest_are_forgotten_and_memory_is_bounded():
    generator, past = random.Random(2), PastTexts(4000, 8)
    for number in range(400):
        past.add(generator.choice("abc"), list(range(1000 * number, 1000 * number + generator.randint(1, 300))))
        assert past.num_tokens <= 4000
    known = [any(follows(past, owner, [1000 * number]) for owner in "abc") for number in range(400)]
    newest = [number for number, is_known in enumerate(known) if is_known]
    assert min(newest) > 350
    assert 399 in newest
    assert len(newest) > 15


def test_many_owners_of_little_are_bounded_too():
    past = PastTexts(100 * OWN_TOKENS, 8)
    for number in range(1000):
        past.add(number, [1, 2])
    assert past.num_tokens <= 100 * OWN_TOKENS
    assert past.automata(999)
    assert not past.automata(0)


def test_the_least_is_the_least_that_keeps_something_within_its_bound():
    for max_tokens in range(1, 300):
        past, most, is_kept = PastTexts(max_tokens, 8), 0, True
        for number in range(20):
            past.add("a", list(range(100 * number, 100 * number + 50)))
            most, is_kept = max(most, past.num_tokens), is_kept and bool(past.automata("a"))
        assert (is_kept and most <= max_tokens) is (max_tokens >= LEAST_TOKENS), max_tokens


def test_a_long_text_keeps_its_end():
    past = PastTexts(800, 8)
    past.add("a", list(range(500)))
    assert follows(past, "a", [498]) == [499]
    assert follows(past, "a", [10]) == []


def test_nothing_is_shared_with_no_room():
    past = PastTexts(0, 8)
    past.add("a", [1, 2, 3])
    assert past.automata("a") == []
    assert past.num_tokens == 0
