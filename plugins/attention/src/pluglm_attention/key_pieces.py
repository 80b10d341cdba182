"""Attention of many sequences with few queries each, in plain torch: their keys are cut into pieces of one length, and
pieces of whatever sequences are computed together.

That batches short sequences and splits long ones in one scheme; the pieces of a sequence are merged afterwards by their
tops and totals, as in Flash-Decoding (Dao et al., 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm_attention.online_softmax import LOWEST, scaled_queries, scores_of
from pluglm_attention.rows import Rows
from pluglm_attention.slots import first_visible_key

# B: sequences, Q: queries of each, filled up to the most, P: pieces, S: keys of a piece
# N: query heads, K: kv heads, G: query heads of a kv head (N = K * G), M = G * Q: rows of a product, H: head dim

MOST_QUERIES = 16  # of a sequence; with more, tiles waste less than filling up would
PIECE = 256
_VALUES_AT_ONCE = 1 << 19  # of keys that are gathered together, so that they stay in the cache


@dataclass(frozen=True, slots=True)
class PieceBatch:
    """rows_BQ int64: rows of the flat batch, a sequence's last one repeated. filled_R, targets_R: which of the B * Q
    are not repetitions, and the rows of those.

    slots_PS int64; owner_P int64: which sequence a piece is of; hidden_PQS bool: which keys a query does not see.
    """

    rows_BQ: torch.Tensor
    filled_R: torch.Tensor
    targets_R: torch.Tensor
    slots_PS: torch.Tensor
    owner_P: torch.Tensor
    hidden_PQS: torch.Tensor


def piece_batches(
    segments: Sequence[Segment], block_size: int, window: int | None, device: torch.device
) -> list[PieceBatch]:
    """Of segments with 1 to MOST_QUERIES queries, those that are filled up to one power of two together."""
    buckets: dict[int, list[Segment]] = {}
    for segment in segments:
        buckets.setdefault((segment.num_query - 1).bit_length(), []).append(segment)
    return [_piece_batch(bucket, block_size, window, device) for _, bucket in sorted(buckets.items())]


def _piece_batch(segments: list[Segment], block_size: int, window: int | None, device: torch.device) -> PieceBatch:
    firsts = [first_visible_key(segment.num_context, window) for segment in segments]
    size = min(PIECE, max(s.num_keys - first for s, first in zip(segments, firsts, strict=True)))
    pieces = [
        (owner, start)
        for owner, (segment, first) in enumerate(zip(segments, firsts, strict=True))
        for start in range(first, segment.num_keys, size)
    ]
    owner_P, start_P = torch.tensor(pieces, device=device).unbind(1)
    most = max(segment.num_query for segment in segments)
    offsets = [[min(i, segment.num_query - 1) for i in range(most)] for segment in segments]
    offset_BQ = torch.tensor(offsets, device=device)
    facts = [(segment.query_start, segment.num_context, segment.num_keys - 1) for segment in segments]
    row_B, context_B, last_B = torch.tensor(facts, device=device).unbind(1)
    positions_PS = start_P[:, None] + torch.arange(size, device=device)
    query_PQ1 = (context_B[:, None] + offset_BQ)[owner_P].unsqueeze(2)
    hidden_PQS = positions_PS.unsqueeze(1) > query_PQ1
    if window is not None:
        hidden_PQS |= query_PQ1 - positions_PS.unsqueeze(1) >= window
    rows_BQ = row_B[:, None] + offset_BQ
    filled = [i * most + j for i, segment in enumerate(segments) for j in range(segment.num_query)]
    filled_R = torch.tensor(filled, device=device)
    return PieceBatch(
        rows_BQ=rows_BQ,
        filled_R=filled_R,
        targets_R=rows_BQ.flatten()[filled_R],
        # Beyond the last key it stands in itself: hidden, written, and of the same sequence.
        slots_PS=_slots(segments, block_size, torch.minimum(positions_PS, last_B[owner_P, None]), owner_P),
        owner_P=owner_P,
        hidden_PQS=hidden_PQS,
    )


def _slots(segments: list[Segment], block_size: int, positions_PS: torch.Tensor, owner_P: torch.Tensor) -> torch.Tensor:
    starts, blocks = [], list[int]()
    for segment in segments:
        starts.append(len(blocks))
        blocks += segment.block_table
    table, start_B = (torch.tensor(x, device=positions_PS.device) for x in (blocks, starts))
    block_PS = start_B[owner_P, None] + positions_PS // block_size
    return table[block_PS] * block_size + positions_PS % block_size


def attend_pieces(
    layer: LayerSpec, q_TNH: torch.Tensor, keys: Rows, values: Rows, batch: PieceBatch, out_TNH: torch.Tensor
) -> None:
    """Writes the rows of the batch to out_TNH."""
    num_sequences, num_queries = batch.rows_BQ.shape
    num_kv_heads, head_dim = layer.num_kv_heads, layer.head_dim
    q_RNH = scaled_queries(layer, q_TNH.index_select(0, batch.rows_BQ.flatten()))
    q_BQKGH = q_RNH.view(num_sequences, num_queries, num_kv_heads, -1, head_dim)
    q_BKMH = q_BQKGH.permute(0, 2, 3, 1, 4).reshape(num_sequences, num_kv_heads, -1, head_dim)
    num_pieces, size = batch.slots_PS.shape
    at_once = max(1, _VALUES_AT_ONCE // (size * num_kv_heads * head_dim))
    parts = []
    for first in range(0, num_pieces, at_once):
        some = slice(first, first + at_once)
        k_CSH, v_CSH = (_gathered(x, batch.slots_PS[some]) for x in (keys, values))  # C: K times as many
        q_CMH = q_BKMH.index_select(0, batch.owner_P[some]).flatten(0, 1)
        parts.append(_partial(layer, q_CMH, k_CSH, v_CSH, batch.hidden_PQS[some]))
    top_PKM1, total_PKM1, sum_PKMH = (_by_piece(torch.cat(many), num_kv_heads) for many in zip(*parts, strict=True))
    if num_pieces > num_sequences:
        total_BKM1, sum_BKMH = _merged(top_PKM1, total_PKM1, sum_PKMH, batch.owner_P, num_sequences)
    else:
        total_BKM1, sum_BKMH = total_PKM1, sum_PKMH
    out_BKGQH = (sum_BKMH / total_BKM1).view(num_sequences, num_kv_heads, -1, num_queries, head_dim)
    out_RNH = out_BKGQH.permute(0, 3, 1, 2, 4).reshape(-1, *out_TNH.shape[1:])
    out_TNH.index_copy_(0, batch.targets_R, out_RNH.index_select(0, batch.filled_R).to(out_TNH.dtype))


def _gathered(stored: Rows, slots_PS: torch.Tensor) -> torch.Tensor:
    """[P * K, S, H] float32."""
    found_CKH = stored.index_select(0, slots_PS.flatten())
    found_PSKH = found_CKH.view(*slots_PS.shape, *found_CKH.shape[1:])
    return found_PSKH.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format).flatten(0, 1)


def _by_piece(x_CMX: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[P, K, M, X] of the C = P * K products."""
    return x_CMX.view(-1, num_kv_heads, *x_CMX.shape[1:])


def _partial(
    layer: LayerSpec, q_CMH: torch.Tensor, k_CSH: torch.Tensor, v_CSH: torch.Tensor, hidden_PQS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(top, total, sum) of each piece by itself. A row that sees nothing of it has a total of 0."""
    scores_CMS = scores_of(layer, q_CMH, k_CSH)
    num_pieces, num_queries, size = hidden_PQS.shape
    hidden_P11QS = hidden_PQS[:, None, None]
    scores_CMS.view(num_pieces, layer.num_kv_heads, -1, num_queries, size).masked_fill_(hidden_P11QS, float("-inf"))
    top_CM1 = scores_CMS.amax(dim=-1, keepdim=True).clamp_min_(LOWEST)
    weights_CMS = scores_CMS.sub_(top_CM1).exp_()
    return top_CM1, weights_CMS.sum(dim=-1, keepdim=True), torch.bmm(weights_CMS, v_CSH)


def _merged(
    top_PKM1: torch.Tensor, total_PKM1: torch.Tensor, sum_PKMH: torch.Tensor, owner_P: torch.Tensor, num_sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, sum) of each sequence, relative to the highest top of its pieces."""
    shape = (num_sequences, *top_PKM1.shape[1:])
    index_PKM1 = owner_P[:, None, None, None].expand_as(top_PKM1)
    top_BKM1 = top_PKM1.new_full(shape, LOWEST).scatter_reduce_(0, index_PKM1, top_PKM1, "amax")
    shrink_PKM1 = torch.exp(top_PKM1 - top_BKM1[owner_P])
    total_BKM1 = top_PKM1.new_zeros(shape).index_add_(0, owner_P, total_PKM1 * shrink_PKM1)
    sum_BKMH = sum_PKMH.new_zeros((num_sequences, *sum_PKMH.shape[1:])).index_add_(0, owner_P, sum_PKMH * shrink_PKM1)
    return total_BKM1, sum_BKMH
