"""The keys of hash_prefix: what they are made of, that they cannot be guessed, and that a collision is a miss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluglm.testing.context import make_context
from pluglm.testing.kv_prefix_desk import Desk, words
from pluglm_prefix_cache.hash_index import HashIndex, block_fields, keyed_digest
from pluglm_prefix_cache.hash_prefix import HashPrefixKV

SIZE = 4
BLOCKS = st.tuples(
    st.none() | st.binary(max_size=12), st.binary(max_size=12), st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
)


def desk_with(digest: Callable[[bytes], bytes]) -> Desk:
    """A hash_prefix manager whose index hashes as told."""

    def make() -> Any:
        manager = HashPrefixKV(HashPrefixKV.Config(block_size=SIZE, num_blocks=16), make_context(kv_bytes=1 << 40))
        manager._cache.index = HashIndex(SIZE, digest)
        return manager

    return Desk(make)


def first_letter(data: bytes) -> bytes:
    """Collides for every block that has a parent, and for every one that has none."""
    return b"P" if b"P" in data[:64] else b"N"


@pytest.mark.parametrize("digest", [lambda data: b"", first_letter, lambda data: data[-8:]])
def test_a_collision_is_a_miss(digest: Callable[[bytes], bytes]) -> None:
    """With one key for everything, all texts are still told apart by namespace, place and tokens."""
    desk = desk_with(digest)
    texts = [words(3 * SIZE, author=1), words(3 * SIZE, author=2), words(SIZE, author=1) + words(2 * SIZE, author=2)]
    for one, text in enumerate(texts):
        assert desk.probe(text) == (SIZE if one == 2 else 0)
        desk.leave(one, text)
        desk.manager.audit()
    for one, text in enumerate(texts):
        assert desk.start(10 + one, text, desk.key(text)) == 3 * SIZE
        desk.expect_text(10 + one, text, "though all keys collide")
        assert desk.probe(text, namespace=b"model B") == 0
    assert desk.probe(words(SIZE, author=2)[:2] + words(2 * SIZE, author=1)) == 0
    assert desk.probe(texts[0][SIZE:]) == 0  # the second block is no first block


@given(first=BLOCKS, second=BLOCKS)
def test_different_blocks_have_different_fields(
    first: tuple[bytes | None, bytes, tuple[int, ...]], second: tuple[bytes | None, bytes, tuple[int, ...]]
) -> None:
    """The parent's key counts only where there is a parent, as the docstring says."""
    meaning = [(namespace, key if namespace is None else b"", tokens) for namespace, key, tokens in (first, second)]
    assert (block_fields(*first) == block_fields(*second)) == (meaning[0] == meaning[1])


def test_the_digest_is_the_whole_keyed_blake2b() -> None:
    """Against hashlib called in one go (RFC 7693: 64 bytes at most)."""
    secret, data = bytes(range(64)), b"some fields"
    assert keyed_digest(secret)(data) == hashlib.blake2b(data, key=secret, digest_size=64).digest()
    assert len(keyed_digest(secret)(data)) == 64
    assert keyed_digest(bytes(64))(data) != keyed_digest(secret)(data)


def test_two_managers_have_different_keys_for_the_same_block() -> None:
    keys = [HashIndex(SIZE)._key(b"space", None, (1, 2, 3, 4)) for _ in range(2)]
    assert keys[0] != keys[1]


def test_a_key_stands_for_all_tokens_before_it() -> None:
    """One block after two others, and first of all in two namespaces: six blocks, six keys."""
    desk = desk_with(keyed_digest(bytes(64)))
    same = words(SIZE)
    for one, text in enumerate((words(SIZE, author=1) + same, words(SIZE, author=2) + same, same)):
        desk.leave(one, text)
    desk.leave(9, same, namespace=b"model B")
    assert len({entry.place[0] for entry in desk.manager._cache.entries.values()}) == 6


def test_audit_finds_an_entry_under_a_wrong_key() -> None:
    desk = desk_with(keyed_digest(bytes(64)))
    desk.leave(1, words(2 * SIZE))
    desk.manager.audit()
    entries = desk.manager._cache.index._entries
    key, bucket = entries.popitem()
    entries[key[::-1]] = bucket
    with pytest.raises(RuntimeError, match=r"does not find block [01] by its content"):
        desk.manager.audit()


def test_the_index_is_no_larger_than_the_pool() -> None:
    """A hundred texts through 8 blocks: what is evicted leaves no key behind."""
    manager = HashPrefixKV(HashPrefixKV.Config(block_size=SIZE, num_blocks=8), make_context(kv_bytes=1 << 40))
    desk = Desk(lambda: manager)
    for one in range(100):
        desk.leave(one, words(3 * SIZE, author=one))
        assert len(manager._cache.index._entries) <= 8  # type: ignore[attr-defined]
        assert len(manager._cache.entries) <= 8
    manager.audit()
