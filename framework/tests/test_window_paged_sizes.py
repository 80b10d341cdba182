"""How the window-paged manager divides a budget, by the arithmetic in its docstrings, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.kv import KVGroup, KVLayout
from pluglm.kv.paged import PagedKV
from pluglm.kv.window_paged import WindowPagedKV
from pluglm.models.gemma3 import Gemma3Model
from pluglm.testing.context import make_context, small_spec

# The sizes of google/gemma-3-270m's config.json, as far as KV memory depends on them.
GEMMA_3_270M = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262_144,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}


def context(windows: tuple[int | None, ...], **fields: Any) -> Any:
    """Layers of one kv head of size 1 in float32: a token has 8 bytes in each."""
    layers = small_spec(num_layers=len(windows), num_heads=1, num_kv_heads=1, head_dim=1).layers
    layers = tuple(replace(layer, window=window) for layer, window in zip(layers, windows, strict=True))
    spec = replace(small_spec(), layers=layers)
    return make_context(spec=spec, **{"max_num_seqs": 4, "max_model_len": 1000, "max_step_tokens": 32, **fields})


def manager(windows: tuple[int | None, ...], config: dict[str, Any] | None = None, **fields: Any) -> WindowPagedKV:
    return WindowPagedKV(WindowPagedKV.Config(**config or {}), context(windows, **fields))


def test_without_windows_it_is_the_paged_manager() -> None:
    for kv_bytes in (16 * 16, 5 * 16 * 16 + 15, 1 << 30):
        plain = PagedKV(PagedKV.Config(), context((None, None), kv_bytes=kv_bytes))
        found = manager((None, None), kv_bytes=kv_bytes)
        assert found.layout == plain.layout
        assert found.max_request_tokens() == plain.max_request_tokens()


def test_a_generous_budget_gives_every_seat_a_span_behind_each_window() -> None:
    """4 seats of 1000 tokens are 252 blocks of 16. A span is ceil((100 - 1 + 64 - 1 + 32) / 16) = 13 blocks."""
    found = manager((100, None, 100), kv_bytes=1 << 30)
    groups = (
        KVGroup(layers=(0, 2), num_blocks=4 * 13, window=100),
        KVGroup(layers=(1,), num_blocks=4 * math.ceil(1000 / 16)),
    )
    assert found.layout == KVLayout(num_blocks=304, block_size=16, groups=groups)
    assert found.max_request_tokens() == 252 * 16


@pytest.mark.parametrize("count", [20, 44, 45, 46, 100, 251])
def test_a_tight_budget_is_divided_as_far_as_it_goes(count: int) -> None:
    """A window's pool has as many blocks as the others, up to a span of 13 and three times ceil(163 / 16) + 1 = 12."""
    for spare in (0, 16 * 8 - 1):
        cost = 16 * 8 * (count + 2 * min(count, 13 + 3 * 12))
        sizes = [group.num_blocks for group in manager((100, None, 100), kv_bytes=cost + spare).layout.groups]
        assert sizes == [min(count, 49), count]


def test_num_windows_makes_room_for_sequences_without_a_seat() -> None:
    groups = manager((100, None), {"num_windows": 9}, kv_bytes=1 << 30).layout.groups
    assert [group.num_blocks for group in groups] == [9 * 13, 252]


def test_steps_longer_than_the_context_need_no_more_than_it() -> None:
    """A span is then ceil((100 - 1 + 64 - 1 + 1000) / 16) = 73 blocks, and no sequence has more than 63."""
    groups = manager((100, None), max_step_tokens=4096, max_num_seqs=1, kv_bytes=1 << 30).layout.groups
    assert [group.num_blocks for group in groups] == [63, 63]


@pytest.mark.parametrize(
    ("num_blocks", "most"),
    [(13, 1000), (12, 12 * 16), (5, 5 * 16)],  # 13 blocks are a span, which serves any length
)
def test_windows_alone_limit_no_length_once_a_span_fits(num_blocks: int, most: int) -> None:
    assert manager((100, 100), {"num_blocks": num_blocks}, kv_bytes=1 << 30).max_request_tokens() == most


def test_a_budget_too_small_is_refused_with_numbers() -> None:
    with pytest.raises(PluginError, match=r"1 block\(s\) of 16 tokens need 384 bytes over all layers.*budget is 383"):
        manager((100, None, 100), kv_bytes=383)
    with pytest.raises(PluginError, match=r"7 block\(s\) of 4 tokens need 448 bytes over all layers.*budget is 447"):
        manager((100, None), {"block_size": 4, "num_blocks": 7}, kv_bytes=447)


@pytest.mark.parametrize("config", [{"block_size": 0}, {"num_blocks": 0}, {"num_windows": 0}, {"blocks": 3}])
def test_bad_config_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        WindowPagedKV.Config(**config)


def held_bytes(kind: Any, spec: Any, num_tokens: int, chunk: int) -> int:
    """float32 bytes of the blocks that one sequence holds once its prompt is computed in chunks."""
    kv_bytes, token_bytes = 1 << 40, spec.kv_values_per_token * 4
    fields = {"max_model_len": 4096, "max_step_tokens": chunk, "kv_bytes": kv_bytes, "bytes_per_token": token_bytes}
    kv = kind(kind.Config(), make_context(spec=spec, **fields))
    for num_computed in [*range(0, num_tokens, chunk), num_tokens]:
        transaction = kv.transaction()
        if not num_computed:
            transaction.acquire(1)
            transaction.extend(1, num_tokens)
        if kv.layout.groups:
            transaction.advance(1, num_computed)
        transaction.commit()
    if not kv.layout.groups:
        return len(kv.block_table(1)) * 16 * token_bytes
    layers = [len(group.layers) for group in kv.layout.groups]
    counts = [len(table.blocks) for table in kv.group_tables(1)]
    return sum(n * count for n, count in zip(layers, counts, strict=True)) * 16 * token_bytes // len(spec.layers)


def test_kv_bytes_of_2000_tokens_of_gemma_3_270m() -> None:
    """Three layers of 18 keep all 125 blocks; 15 keep the tokens from 1472 = 23 * 64 on, which are 33 blocks."""
    spec = Gemma3Model.read_spec(GEMMA_3_270M)
    block_bytes = 16 * 2 * 256 * 4  # in one layer: keys and values of one head
    assert held_bytes(PagedKV, spec, 2000, 512) == 18 * 125 * block_bytes == 73_728_000
    assert held_bytes(WindowPagedKV, spec, 2000, 512) == (3 * 125 + 15 * 33) * block_bytes == 28_508_160


@pytest.mark.slow
def test_the_packaged_gemma_has_these_sizes() -> None:
    from pluglm.kernel.errors import CheckpointError
    from pluglm.weights.open import open_checkpoint
    from pluglm.weights.resolve import resolve_model

    try:
        path = resolve_model("gemma-3-270m")
    except CheckpointError as error:
        pytest.skip(str(error))
    checkpoint = open_checkpoint(path)
    assert Gemma3Model.read_spec(checkpoint.config).layers == Gemma3Model.read_spec(GEMMA_3_270M).layers
    checkpoint.close()


def test_what_a_gib_holds_of_gemma_3_270m() -> None:
    """16 seats of 32,768 tokens in bfloat16; 15 windows of ceil(575 / 16) + 1 = 37 blocks and a span of 68 are 623."""
    spec = Gemma3Model.read_spec(GEMMA_3_270M)
    fields: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 32_768, "max_step_tokens": 512, "kv_bytes": 1 << 30}
    context = make_context(spec=spec, bytes_per_token=spec.kv_values_per_token * 2, **fields)
    block_bytes = 16 * 2 * 256 * 2  # in one layer
    counts = [group.num_blocks for group in WindowPagedKV(WindowPagedKV.Config(), context).layout.groups]
    assert counts == [623, ((1 << 30) // block_bytes - 15 * 623) // 3]
    assert [16 * count for count in counts] == [9_968, 299_680]
    assert PagedKV(PagedKV.Config(), context).layout.num_blocks * 16 == (1 << 30) // (18 * block_bytes) * 16 == 58_240
