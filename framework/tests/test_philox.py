"""The coins: known answers of Philox4x64-10, the open interval, and independence of every part of the key."""

from __future__ import annotations

from collections import Counter

import pytest

import pluglm.verification.randomness as randomness
from pluglm.testing.statistics import cell_test
from pluglm.verification.randomness import Purpose, philox_block, uniform, window_uniforms

ONES = 2**64 - 1
# Random123 1.09, tests/kat_vectors, lines "philox4x64 10": counter words, key words, result words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
    ((ONES,) * 4, (ONES,) * 2, (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0)),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert philox_block(key, sum(word << (64 * index) for index, word in enumerate(counter))) == expected


def test_mapping_is_the_documented_one() -> None:
    word = philox_block((11, 2), 5 + (1 << 64))[0]
    assert uniform(11, 2, 5, Purpose.ACCEPT) == ((word >> 12) + 0.5) / 2**52


@pytest.mark.parametrize(("word", "expected"), [(0, 2.0**-53), (ONES, 1.0 - 2.0**-53)])
def test_ends_stay_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch, word: int, expected: float) -> None:
    monkeypatch.setattr(randomness, "philox_block", lambda key, counter: (word, 0, 0, 0))
    assert uniform(0, 0, 0) == expected
    assert 0.0 < expected < 1.0


def test_every_part_of_the_key_matters() -> None:
    coins = {
        uniform(seed, lane, position, purpose, index)
        for seed in (0, 1, ONES)
        for lane in range(3)
        for position in range(50)
        for purpose in Purpose
        for index in (0, 1, ONES)
    }
    assert len(coins) == 3 * 3 * 50 * len(Purpose) * 3


def test_a_window_has_coins_of_its_own() -> None:
    """Counter words (position, purpose, index, 0), with the window's start as the index."""
    coins = window_uniforms(11, 2, 7, 3, Purpose.PROPOSE)
    words = [philox_block((11, 2), (7 << 128) | (Purpose.PROPOSE << 64) | position)[0] for position in (7, 8, 9)]
    assert list(coins) == [((word >> 12) + 0.5) / 2**52 for word in words]
    assert list(window_uniforms(11, 2, 7, 1, Purpose.PROPOSE)) == list(coins)[:1]
    assert not set(coins) & set(window_uniforms(11, 2, 8, 3, Purpose.PROPOSE))
    assert len(window_uniforms(11, 2, 7, 0, Purpose.ACCEPT)) == 0


@pytest.mark.parametrize("other", ["seed", "lane", "position", "purpose", "index"])
def test_neighbouring_coins_are_independent(other: str) -> None:
    total = 20_000
    cells: Counter[tuple[int, int]] = Counter()
    for index in range(total):
        one = (index, 0, 0, Purpose.DRAW) if other != "seed" else (2 * index, 0, 0, Purpose.DRAW)
        two = {
            "seed": (2 * index + 1, 0, 0, Purpose.DRAW),
            "lane": (index, 1, 0, Purpose.DRAW),
            "position": (index, 0, 1, Purpose.DRAW),
            "purpose": (index, 0, 0, Purpose.ACCEPT),
            "index": (index, 0, 0, Purpose.DRAW, 1),
        }[other]
        cells[int(4 * uniform(*one)), int(4 * uniform(*two))] += 1
    counts = [cells[a, b] for a in range(4) for b in range(4)]
    assert cell_test(counts, [1 / 16] * 16, delta=1e-8) is None
