"""How many blocks the KV managers make of a budget, by the arithmetic in their docstrings, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kv.contiguous import ContiguousKV
from pluglm.kv.paged import PagedKV


def context(kv_bytes: int, max_num_seqs: int = 4, max_model_len: int = 100) -> BuildContext:
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(BuildContext))
    fields.update(max_num_seqs=max_num_seqs, max_model_len=max_model_len, kv_bytes=kv_bytes, bytes_per_token=10)
    return BuildContext(**fields)


def test_paged_fills_the_budget() -> None:
    manager = PagedKV(PagedKV.Config(), context(kv_bytes=10 * 16 * 5 + 159))
    assert manager.layout == KVLayout(num_blocks=5, block_size=16)
    assert manager.max_request_tokens() == 80


def test_paged_takes_no_more_than_the_seats_can_use() -> None:
    assert PagedKV(PagedKV.Config(), context(1 << 30)).layout.num_blocks == 4 * 7


def test_contiguous_fills_the_budget_with_whole_regions() -> None:
    manager = ContiguousKV(ContiguousKV.Config(), context(kv_bytes=2999))
    assert manager.layout == KVLayout(num_blocks=2, block_size=100)
    assert manager.max_request_tokens() == 100


def test_contiguous_takes_no_more_regions_than_seats() -> None:
    assert ContiguousKV(ContiguousKV.Config(), context(1 << 30)).layout.num_blocks == 4


def test_config_wins() -> None:
    assert PagedKV(PagedKV.Config(block_size=1, num_blocks=9), context(1 << 30)).layout == KVLayout(
        num_blocks=9, block_size=1
    )
    regions = ContiguousKV(ContiguousKV.Config(num_regions=3, region_tokens=7), context(1 << 30))
    assert regions.layout == KVLayout(num_blocks=3, block_size=7)


@pytest.mark.parametrize(
    ("kind", "config", "numbers"),
    [
        (PagedKV, {}, r"1 block\(s\) of 160 bytes need 160 bytes, the KV budget is 159"),
        (PagedKV, {"block_size": 4, "num_blocks": 4}, r"4 block\(s\) of 40 bytes need 160 bytes"),
        (ContiguousKV, {}, r"1 region\(s\) of 1000 bytes need 1000 bytes, the KV budget is 159"),
        (ContiguousKV, {"num_regions": 2, "region_tokens": 8}, r"2 region\(s\) of 80 bytes need 160"),
    ],
)
def test_a_budget_too_small_is_refused_with_numbers(kind: Any, config: dict[str, int], numbers: str) -> None:
    with pytest.raises(PluginError, match=numbers):
        kind(kind.Config(**config), context(kv_bytes=159))


@pytest.mark.parametrize("config", [{"block_size": 0}, {"num_blocks": 0}, {"blocks": 3}])
def test_bad_config_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        PagedKV.Config(**config)
