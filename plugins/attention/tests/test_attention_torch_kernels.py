"""How the torch kernels of flash and paged work: no large matrix, short sequences together, long ones in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pluglm.kernel.core import Segment
from pluglm.testing.attention import spec_of
from pluglm.testing.attention_cases import batch_of, fresh_store, make_case, new_rows
from pluglm_attention.key_pieces import PIECE, piece_batches
from pluglm_attention.query_tiles import KEY_TILE, QUERY_TILE, query_tiles
from pluglm_attention.torch_kernels import TorchKernel

CPU = torch.device("cpu")


class Watch(TorchDispatchMode):
    """Counts products, and notes the largest number of values in a result."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products, self.most_values = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "bmm" in function.__name__:
            self.num_products += 1
        if isinstance(result, torch.Tensor):
            self.most_values = max(self.most_values, result.numel())
        return result


def watch(kernel: TorchKernel, layer: Any, lengths: list[tuple[int, int]]) -> Watch:
    """One run after its store is filled."""
    case = make_case(layer, lengths, block_size=16, shuffled=True)
    store, rows, batch = fresh_store(case, spec_of(layer), "cpu"), new_rows(case, "cpu"), batch_of(case, "cpu")
    with torch.inference_mode(), Watch() as seen:
        kernel.run(layer, *rows, kernel.plan(batch), store)
    return seen


def segment(num_context: int, num_query: int, start: int = 0) -> Segment:
    table = tuple(range(-(-(num_context + num_query) // 16)))
    return Segment(sequence_id=0, query_start=start, num_query=num_query, num_context=num_context, block_table=table)


@pytest.mark.parametrize("kernel", [TorchKernel.flash(), TorchKernel.paged()])
def test_nothing_grows_with_the_square_of_the_length(world: Any, kernel: TorchKernel) -> None:
    """Beside a few values for each row and key, only tiles of scores."""
    layer, length = world.layer(4, 1, 64), 3000
    store = 4 * 64 * (length + 64)  # query heads times head dim for every token, and unused slots
    assert watch(kernel, layer, [(0, length)]).most_values <= max(store, 4 * QUERY_TILE * KEY_TILE)


@pytest.mark.parametrize("window", [None, 1, 100, 1000])
def test_only_tiles_inside_causal_order_and_window(window: int | None) -> None:
    """Every visible pair is in one tile; a tile has a visible pair; a mask hides exactly what must be hidden."""
    num_context, num_query = 300, 700
    seen = torch.zeros((num_query, num_context + num_query), dtype=torch.int64)
    for tile in query_tiles(segment(num_context, num_query), 16, window, CPU):
        for one in tile.tiles:
            hidden = torch.zeros((tile.rows.stop - tile.rows.start, one.stop - one.start), dtype=torch.bool)
            hidden = hidden if one.hidden_AS is None else one.hidden_AS
            assert not hidden.all()
            assert one.hidden_AS is None or hidden.any()
            seen[tile.rows, one.start : one.stop] += (~hidden).long()
    query, key = torch.meshgrid(torch.arange(num_query), torch.arange(num_context + num_query), indexing="ij")
    distance = num_context + query - key
    assert torch.equal(seen, ((distance >= 0) & (distance < (window or 10**6))).long())


def test_short_sequences_are_one_product_each_way(world: Any) -> None:
    layer = world.layer(4, 2, 64)
    counts = [watch(TorchKernel.paged(), layer, [(20, 1)] * number).num_products for number in (1, 24)]
    assert counts == [2, 2]
    assert watch(TorchKernel.flash(), layer, [(20, 1)] * 24).num_products == 48


def test_long_sequences_are_split_along_their_keys() -> None:
    (batch,) = piece_batches([segment(10 * PIECE, 1), segment(3, 1, start=1)], 16, None, CPU)
    assert batch.slots_PS.shape == (12, PIECE)
    assert batch.owner_P.tolist() == [0] * 11 + [1]
    assert (~batch.hidden_PQS).sum().tolist() == 10 * PIECE + 1 + 4


def test_a_window_leaves_the_last_pieces() -> None:
    (batch,) = piece_batches([segment(10 * PIECE, 1)], 16, 40, CPU)
    assert batch.slots_PS.tolist() == [list(range(10 * PIECE - 39, 10 * PIECE + 1))]


def test_verify_windows_are_filled_up_to_the_longest_of_their_bucket() -> None:
    segments = [segment(9, 1), segment(30, 3, start=1), segment(8, 4, start=4), segment(2, 9, start=8)]
    one, four, nine = piece_batches(segments, 16, None, CPU)
    assert [batch.rows_BQ.shape for batch in (one, four, nine)] == [(1, 1), (2, 4), (1, 9)]
    assert four.rows_BQ.tolist() == [[1, 2, 3, 3], [4, 5, 6, 7]]
    assert four.targets_R.tolist() == [1, 2, 3, 4, 5, 6, 7]
