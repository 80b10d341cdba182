"""Attention of one sequence in tiles of queries and keys, in plain torch: never a matrix of all queries and all keys.

FlashAttention-2 (Dao, 2023, arXiv:2307.08691): for each tile of queries the keys pass by a tile at a time, and only
the tiles that the causal order and the window leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.online_softmax import OnlineSoftmax, scaled_queries, scores_of
from pluglm_attention.rows import Rows
from pluglm_attention.scores import visible
from pluglm_attention.slots import first_visible_key
from pluglm_attention.stored_keys import StoredKeys, stored_keys

# A: queries of a tile, S: keys of a tile, M = G * A: rows of one kv head's product
# N: query heads, K: kv heads, G: query heads of a kv head (N = K * G), H: head dim

QUERY_TILE = 128
KEY_TILE = 256
_FEW_QUERIES = 16
_KEYS_OF_FEW = 2048  # with few rows a tile of 256 keys is less work than starting it


@dataclass(frozen=True, slots=True)
class KeyTile:
    """Positions start .. stop. hidden_AS: bool, which rows do not see which of them; None if all see all."""

    start: int
    stop: int
    hidden_AS: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Rows of the flat batch that are of one sequence and side by side, and the keys that any of them sees."""

    rows: slice
    keys: StoredKeys
    tiles: tuple[KeyTile, ...]


def query_tiles(segment: Segment, block_size: int, window: int | None, device: torch.device) -> list[QueryTile]:
    """The tiles of one segment, for layers with this window; none when it has no queries."""
    if segment.num_query == 0:
        return []
    keys = stored_keys(segment, block_size, device, first_visible_key(segment.num_context, window))
    tiles: list[QueryTile] = []
    for row in range(0, segment.num_query, QUERY_TILE):
        num_rows = min(QUERY_TILE, segment.num_query - row)
        first = segment.query_start + row
        key_tiles = _key_tiles(segment.num_context + row, num_rows, window, device)
        tiles.append(QueryTile(slice(first, first + num_rows), keys, key_tiles))
    return tiles


def _key_tiles(position: int, num_rows: int, window: int | None, device: torch.device) -> tuple[KeyTile, ...]:
    """Of queries at position .. position + num_rows."""
    size = _KEYS_OF_FEW if num_rows <= _FEW_QUERIES else KEY_TILE
    end = position + num_rows
    tiles: list[KeyTile] = []
    for start in range(first_visible_key(position, window), end, size):
        stop = min(start + size, end)
        hidden_AS = None
        if stop - 1 > position or (window is not None and start <= end - 1 - window):
            rows_A, keys_S = (torch.arange(*span, device=device) for span in ((position, end), (start, stop)))
            hidden_AS = ~visible(rows_A, keys_S, window)
        tiles.append(KeyTile(start, stop, hidden_AS))
    return tuple(tiles)


def attend_tile(layer: LayerSpec, q_ANH: torch.Tensor, keys: Rows, values: Rows, tile: QueryTile) -> torch.Tensor:
    """out_ANH float32 of the tile's rows q_ANH. keys, values: of the layer's whole store, [slots, K, H]."""
    num_rows, num_heads, head_dim = q_ANH.shape
    num_kv_heads = layer.num_kv_heads
    q_KGAH = scaled_queries(layer, q_ANH).view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    q_KMH = q_KGAH.reshape(num_kv_heads, -1, head_dim)
    softmax = OnlineSoftmax(q_KMH)
    for one in tile.tiles:
        k_KSH, v_KSH = (tile.keys.read(x, one.start, one.stop).transpose(0, 1).float() for x in (keys, values))
        scores_KMS = scores_of(layer, q_KMH, k_KSH)
        if one.hidden_AS is not None:
            scores_KMS.view(num_kv_heads, -1, *one.hidden_AS.shape).masked_fill_(one.hidden_AS, float("-inf"))
        softmax.add(scores_KMS, v_KSH)
    out_KGAH = softmax.result().view(num_kv_heads, -1, num_rows, head_dim)
    return out_KGAH.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
