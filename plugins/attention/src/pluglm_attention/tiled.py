"""Attention whose every operation has one fixed shape, so that no row's bits depend on its batch or its chunk."""

from __future__ import annotations

import torch
from torch.nn import functional

from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.scores import capped, visible
from pluglm_attention.slots import first_visible_key

# Q: queries of one segment, S: its keys, N: query heads, K: kv heads, G: query heads of a kv head, H: head dim
# A: rows of a query tile, B: keys of a key tile, M = G * A: rows of one kv head's product

QUERY_TILE = 16
KEY_TILE = 64  # a multiple of QUERY_TILE: no query tile straddles two key tiles

# Below every score and finite: a row that has seen no key yet then scales by exp(0), not by exp(-inf + inf).
_LOWEST = -1e30


def tiled_attention(
    layer: LayerSpec, q_QNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, num_context: int
) -> torch.Tensor:
    """out_QNH float32, as plain_attention computes it, by the online softmax of Milakov and Gimelshein (2018,
    arXiv:1805.02867) over key tiles in ascending order.

    Tiles sit at absolute positions (multiples of their size), filled up with zeros, so position p is always row
    p % 16 of the same products. A key tile that a row sees nothing of leaves its sums exactly as they are.
    """
    before = num_context % QUERY_TILE
    q_ANH = _padded(q_QNH.float(), before, QUERY_TILE)
    k_BKH, v_BKH = (_padded(x.float(), 0, KEY_TILE) for x in (k_SKH, v_SKH))
    out = torch.empty_like(q_ANH)
    for row in range(0, q_ANH.shape[0], QUERY_TILE):
        tile = slice(row, row + QUERY_TILE)
        out[tile] = _query_tile(layer, q_ANH[tile], k_BKH, v_BKH, num_context - before + row)
    return out[before : before + q_QNH.shape[0]]


def _padded(x: torch.Tensor, before: int, multiple: int) -> torch.Tensor:
    """x with `before` zero rows in front and as many behind as make the count a multiple."""
    after = -(before + x.shape[0]) % multiple
    return functional.pad(x, (0, 0, 0, 0, before, after)).contiguous()


def _query_tile(
    layer: LayerSpec, q_ANH: torch.Tensor, k_BKH: torch.Tensor, v_BKH: torch.Tensor, position: int
) -> torch.Tensor:
    """out_ANH of the tile whose first row is at `position`; k and v hold all key tiles."""
    num_kv_heads, head_dim = k_BKH.shape[1:]
    q_KGAH = q_ANH.view(QUERY_TILE, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    q_KMH = q_KGAH.reshape(num_kv_heads, -1, head_dim).contiguous()
    top_KM1 = q_KMH.new_full((*q_KMH.shape[:2], 1), _LOWEST)
    total_KM1 = torch.zeros_like(top_KM1)
    sum_KMH = torch.zeros_like(q_KMH)
    rows_A = torch.arange(position, position + QUERY_TILE, device=q_ANH.device)
    first_tile = first_visible_key(position, layer.window) // KEY_TILE * KEY_TILE
    for first_key in range(first_tile, position + QUERY_TILE, KEY_TILE):
        k_KBH, v_KBH = (x[first_key : first_key + KEY_TILE].transpose(0, 1).contiguous() for x in (k_BKH, v_BKH))
        mask_AB = visible(rows_A, torch.arange(first_key, first_key + KEY_TILE, device=rows_A.device), layer.window)
        scores_KMB = capped(torch.bmm(q_KMH, k_KBH.transpose(1, 2)) * layer.scale, layer.soft_cap)
        masked_MB = ~mask_AB.repeat(q_KMH.shape[1] // QUERY_TILE, 1)
        scores_KMB = scores_KMB.masked_fill(masked_MB, float("-inf"))
        new_top_KM1 = torch.maximum(top_KM1, scores_KMB.amax(dim=-1, keepdim=True))
        weights_KMB = torch.exp(scores_KMB - new_top_KM1)
        shrink_KM1 = torch.exp(top_KM1 - new_top_KM1)
        total_KM1 = total_KM1 * shrink_KM1 + weights_KMB.sum(dim=-1, keepdim=True)
        sum_KMH = sum_KMH * shrink_KM1 + torch.bmm(weights_KMB, v_KBH)
        top_KM1 = new_top_KM1
    out_KGAH = (sum_KMH / total_KM1).view(num_kv_heads, -1, QUERY_TILE, head_dim)
    return out_KGAH.permute(2, 0, 1, 3).reshape(q_ANH.shape)
