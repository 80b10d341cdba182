"""The shape of the radix tree: runs without a branch are one node, split where texts part, joined when one is gone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluglm.kernel.errors import KVExhausted
from pluglm.testing.context import make_context
from pluglm.testing.kv_prefix_desk import SPACE, Desk, words
from pluglm.testing.kv_prefix_walk import common_length as counted_length
from pluglm_prefix_cache.radix import RadixKV
from pluglm_prefix_cache.radix_tree import Node, common_length

SIZE = 4
FEW = st.lists(st.integers(0, 2), max_size=40)


def desk(num_blocks: int = 32) -> Desk:
    return Desk(lambda: RadixKV(RadixKV.Config(block_size=SIZE, num_blocks=num_blocks), make_context(kv_bytes=1 << 40)))


def shape(bench: Desk, namespace: bytes = SPACE) -> Any:
    """Numbers of tokens: a node as (tokens, children), sorted."""

    def of(node: Node) -> Any:
        return len(node.tokens), sorted(of(child) for child in node.children.values())

    root = bench.manager._cache.index._roots.get(namespace)
    return None if root is None else of(root)


@given(first=FEW, second=FEW)
def test_common_length_is_what_counting_says(first: list[int], second: list[int]) -> None:
    assert common_length(first, second) == counted_length(first, second)
    assert common_length([*first, *second], [*first, 9]) == len(first)


def test_one_text_is_one_node_however_it_grew() -> None:
    bench = desk()
    text = words(6 * SIZE + 2)
    bench.start(1, text)
    for limit in (SIZE + 1, 3 * SIZE, 6 * SIZE + 2):
        bench.publish(1, text, limit)
    assert shape(bench) == (0, [(24, [])])
    bench.release(1)
    assert shape(bench) == (0, [(26, [])])


def test_texts_part_at_the_block_in_which_they_differ() -> None:
    """At token 10 of 26: two blocks in common; the third of each is its own, tokens 8 and 9 twice."""
    bench = desk()
    text = words(26)
    other = text[:10] + words(7, author=1)
    bench.leave(1, text)
    bench.leave(2, other)
    assert shape(bench) == (0, [(8, [(9, []), (18, [])])])
    assert [bench.probe(one, limit) for one in (text, other) for limit in (9, 10, 11, 17)] == [9, 10, 11, 17] * 2
    assert bench.probe(text[:9] + words(9, author=2)) == 9
    bench.manager.audit()


def test_runs_are_joined_when_the_branch_is_evicted() -> None:
    """Nine blocks: eight of text, and one of other's own after four in common. The older end goes for the next four."""
    bench = desk(num_blocks=9)
    text = words(8 * SIZE)
    other = text[: 4 * SIZE] + words(SIZE, author=1)
    bench.leave(1, text)
    bench.start(2, other, bench.key(other))
    bench.publish(2, other)
    assert shape(bench) == (0, [(16, [(4, []), (16, [])])])
    bench.start(3, words(4 * SIZE, author=2))
    assert shape(bench) == (0, [(20, [])])
    assert (bench.probe(other), bench.probe(text)) == (20, 16)
    bench.manager.audit()


def test_a_longer_end_takes_the_place_of_a_shorter_one() -> None:
    """Three turns of one conversation, each of which ends inside a block: one text is left, and no block is wasted."""
    bench = desk()
    text = words(19)
    for turn, length in enumerate((5, 6, 11, 19)):
        adopted = bench.start(turn, text[:length], bench.key(text[:length]))
        assert adopted == (0, 5, 6, 11)[turn]
        bench.publish(turn, text[:length])
        bench.release(turn)
    assert shape(bench) == (0, [(19, [])])
    assert bench.manager.capacity().cached_blocks == 5


def test_of_two_equally_good_blocks_the_smaller_text_is_taken() -> None:
    bench = desk()
    for one, last in ((1, 9), (2, 5)):
        bench.leave(one, [0, 1, 2, last])
    bench.change(lambda kv: kv.acquire(3, bench.key([0, 1, 2, 7])))
    assert bench.manager.block_table(3) == (1,)  # that of [0, 1, 2, 5]


def test_a_transaction_adopts_of_what_it_has_not_evicted() -> None:
    """It evicts [0, 1, 2, 3], the older text, and then finds two tokens of it in the other one."""
    bench = desk(num_blocks=2)
    for one, text in ((1, [0, 1, 2, 3]), (2, [0, 1, 9, 9])):
        bench.leave(one, text)
    transaction = bench.manager.transaction()
    transaction.acquire(3)
    transaction.extend(3, 1)
    assert transaction.acquire(4, bench.key([0, 1, 2, 3])) == 2
    assert bench.probe([0, 1, 2, 3]) == 4
    transaction.rollback()


def test_hits_of_a_block_that_grows_count_on() -> None:
    """Six tokens, adopted by one that goes on to seven; these by one that goes on to eight, the whole block."""
    bench = desk()
    bench.leave(0, words(6))
    for one, length in ((1, 7), (2, 8)):
        bench.start(one, words(length), bench.key(words(length)))
        bench.publish(one, words(length))
        bench.release(one)
        assert {block: entry.num_hits for block, entry in bench.manager._cache.entries.items()} == {0: one, 1: one}


def test_what_a_longer_text_says_too_is_not_kept_twice() -> None:
    """The end of the first text is the beginning of a block of the second, which was computed without the cache."""
    bench = desk()
    bench.leave(1, words(SIZE + 2))
    assert bench.manager.capacity().cached_blocks == 2
    bench.leave(2, words(3 * SIZE))
    assert bench.manager.capacity().cached_blocks == 3
    bench.leave(3, words(SIZE + 3))
    assert bench.manager.capacity().cached_blocks == 3
    bench.leave(4, words(SIZE) + words(SIZE, author=1))
    bench.leave(5, words(SIZE + 3))
    assert bench.manager.capacity().cached_blocks == 4
    bench.manager.audit()


@pytest.mark.parametrize(
    "damage",
    [
        lambda node: node.tokens.pop(),
        lambda node: node.keys.reverse(),
        lambda node: node.children.popitem(),
        lambda node: setattr(node, "first", 1),
        lambda node: node.entries.reverse(),
        lambda node: setattr(node.children[node.keys[0]], "parent", None),
        lambda node: setattr(node, "namespace", b"other"),
    ],
)
def test_audit_finds_damage_to_the_tree(damage: Any) -> None:
    bench = desk()
    bench.leave(1, words(5 * SIZE))
    bench.leave(2, words(2 * SIZE) + words(SIZE, author=1))
    bench.manager.audit()
    root = bench.manager._cache.index._roots[SPACE]
    damage(root.children[root.keys[0]])
    with pytest.raises(RuntimeError, match="the tree is unsound at block"):
        bench.manager.audit()


def test_a_namespace_without_blocks_is_gone() -> None:
    bench = desk(num_blocks=4)
    for one in range(20):
        bench.leave(one, words(4 * SIZE, author=one), namespace=b"tenant %d" % one)
    assert list(bench.manager._cache.index._roots) == [b"tenant 19"]


def test_a_partial_match_is_copied_once_and_the_original_stays() -> None:
    bench = desk()
    text = words(SIZE + 2)
    bench.leave(1, text)
    other = text[: SIZE + 1] + words(1, author=1)
    transaction = bench.manager.transaction()
    assert transaction.acquire(2, bench.key(other)) == SIZE + 1
    transaction.extend(2, len(other))
    assert transaction.commit() == ((1, 2),)
    assert bench.manager.block_table(2) == (0, 2)
    assert bench.probe(text) == len(text)


def test_the_last_block_is_written_on_where_nobody_knows_more_of_it() -> None:
    """All of a cached end is adopted and goes on: no copy, as the cached tokens stay as they are."""
    bench = desk()
    text = words(SIZE + 2)
    bench.leave(1, text)
    transaction = bench.manager.transaction()
    transaction.acquire(2, bench.key(text))
    transaction.extend(2, len(text) + 1)
    assert transaction.commit() == ()
    assert bench.probe(text) == len(text)


def test_without_a_block_for_the_copy_the_cache_lets_go() -> None:
    """A pool of two blocks, full of one text: whoever adopts five of its eight tokens and goes on has them in place."""
    bench = desk(num_blocks=2)
    text = words(2 * SIZE)
    bench.leave(1, text)
    other = text[:5] + words(3, author=1)
    transaction = bench.manager.transaction()
    transaction.acquire(2, bench.key(other))
    with pytest.raises(KVExhausted, match="need 1 more blocks of 4; 0 are free"):
        transaction.extend(2, len(other), evict=False)
    transaction.rollback()
    assert bench.probe(text) == len(text)
    assert bench.start(2, other, bench.key(other)) == 5
    bench.expect_text(2, other, "in the blocks that it adopted")
    assert bench.probe(text) == SIZE
    bench.manager.audit()
