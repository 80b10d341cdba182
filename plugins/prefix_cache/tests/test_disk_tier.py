"""The disk tier after a restart, with damaged and foreign files, beside another one, and at its limit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pluglm.kernel.errors import PluginError
from pluglm.testing.context import make_context
from pluglm.testing.kv_tier import block, same, settled
from pluglm_prefix_cache.disk_tier import DiskTier, DiskTierConfig


@contextmanager
def disk_tier(path: Path, num_bytes: int = 1 << 30) -> Iterator[DiskTier]:
    tier = DiskTier(DiskTierConfig(path=path, bytes=num_bytes), make_context())
    try:
        yield tier
    finally:
        tier.close()


def keep(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        assert settled(tier.store(*block(number))) == "ok"


def found(tier: DiskTier, number: int) -> bool:
    """Whether a load hits; a hit must be right."""
    key, token_ids, data = block(number)
    lease = tier.load(key, token_ids)
    if settled(lease) == "failed":
        return False
    assert same(lease.data, data)
    return True


def file_of(path: Path, number: int) -> Path:
    return path / f"{block(number)[0].hex()}.kvblock"


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    with disk_tier(tmp_path / "new" / "folder") as tier:
        keep(tier, 1, 2, 3)
    with disk_tier(tmp_path / "new" / "folder") as tier:
        assert [tier.has(block(number)[0]) for number in range(5)] == [False, True, True, True, False]
        assert all(found(tier, number) for number in (1, 2, 3))


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    with disk_tier(tmp_path) as tier:
        keep(tier, 1)
    assert file_of(tmp_path, 1).stat().st_mode & 0o077 == 0


def test_every_damaged_file_is_a_miss_and_goes(tmp_path: Path) -> None:
    """A random byte of each part of the file flipped, and the file cut, before and after the tier has seen it."""
    with disk_tier(tmp_path) as tier:
        keep(tier, 1)
    whole, generator = file_of(tmp_path, 1).read_bytes(), random.Random(0)
    for place in range(0, len(whole), 97):
        for cut in (False, True):
            flipped = bytearray(whole)
            flipped[place] ^= generator.randrange(1, 256)
            file_of(tmp_path, 1).write_bytes(whole[:place] if cut else flipped)
            with disk_tier(tmp_path) as tier:
                if not found(tier, 1):
                    assert not tier.has(block(1)[0])
                    assert not file_of(tmp_path, 1).exists()
    file_of(tmp_path, 1).write_bytes(whole)
    with disk_tier(tmp_path) as tier:
        assert found(tier, 1)
        file_of(tmp_path, 1).write_bytes(whole[: len(whole) // 2])
        assert not found(tier, 1)


def test_a_file_under_another_name_is_a_miss(tmp_path: Path) -> None:
    with disk_tier(tmp_path) as tier:
        keep(tier, 1)
    file_of(tmp_path, 1).rename(file_of(tmp_path, 2))
    with disk_tier(tmp_path) as tier:
        assert tier.has(block(2)[0])
        assert not found(tier, 2)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    foreign = [tmp_path / name for name in ("notes.txt", "ab.kvblock", f"{'G' * 64}.kvblock", f"{'0' * 64}.kv")]
    for file in foreign:
        file.write_bytes(b"mine")
    (tmp_path / f"{'0' * 64}.kvblock").mkdir()
    with disk_tier(tmp_path, 0) as tier:
        assert settled(tier.store(*block(1))) == "failed"
        tier.clear()
    assert all(file.read_bytes() == b"mine" for file in foreign)
    assert (tmp_path / f"{'0' * 64}.kvblock").is_dir()


def test_unfinished_files_go_when_they_are_old(tmp_path: Path) -> None:
    old, new = (tmp_path / f".{'0' * 64}.kvblock.{name}.part" for name in ("old", "new"))
    for file in (old, new):
        file.write_bytes(b"begun")
    os.utime(old, (1, 1))
    with disk_tier(tmp_path):
        assert not old.exists()
        assert new.exists(), "another engine may be writing it"


def test_the_longest_unused_goes_first_also_over_a_restart(tmp_path: Path) -> None:
    with disk_tier(tmp_path) as tier:
        keep(tier, 1)
    size = file_of(tmp_path, 1).stat().st_size
    with disk_tier(tmp_path, 3 * size + size // 2) as tier:
        keep(tier, 2, 3)
        assert found(tier, 1)
        keep(tier, 4)
        assert [tier.has(block(number)[0]) for number in (1, 2, 3, 4)] == [True, False, True, True]
    for age, number in enumerate((3, 4, 1)):
        os.utime(file_of(tmp_path, number), (1000 + age, 1000 + age))
    with disk_tier(tmp_path, 2 * size + size // 2) as tier:
        assert [tier.has(block(number)[0]) for number in (1, 3, 4)] == [True, False, True]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_files_never_take_more_than_the_limit(tmp_path: Path) -> None:
    limit = 10_000
    with disk_tier(tmp_path, limit) as tier:
        for number in range(40):
            settled(tier.store(*block(number % 25)))
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= limit


def test_two_tiers_share_a_folder(tmp_path: Path) -> None:
    with disk_tier(tmp_path) as first, disk_tier(tmp_path) as second:
        keep(first, 1)
        keep(second, 2)
        assert not found(second, 1), "each knows what it found and what it stored"
        assert found(first, 1)
    with disk_tier(tmp_path) as third, disk_tier(tmp_path) as fourth:
        third.clear()
        assert not found(fourth, 1), "taken away by another one"
        keep(fourth, 1)
        assert found(fourth, 1)


def test_a_store_that_ends_after_clear_is_forgotten(tmp_path: Path) -> None:
    with disk_tier(tmp_path) as tier:
        leases = [tier.store(*block(number)) for number in range(30)]
        tier.clear()
        for lease in leases:
            settled(lease)
        assert [tier.has(block(number)[0]) for number in range(30)] == [False] * 30
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_failed_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with disk_tier(tmp_path) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            assert settled(tier.store(*block(1))) == "failed"
        assert not tier.has(block(1)[0])
        keep(tier, 1)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PluginError, match=r"the folder .*file/below cannot be used: Not a directory"):
        DiskTier(DiskTierConfig(path=tmp_path / "file" / "below"), make_context())
