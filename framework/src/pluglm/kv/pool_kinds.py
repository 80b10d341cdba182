"""What each window of a model needs of KV memory, and how a budget is divided between them. Knows no sequence."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, partial

from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kv import DROP_UNIT, KVGroup
from pluglm.kernel.interfaces.kv_format import token_bytes


@dataclass(frozen=True, kw_only=True)
class PoolKind:
    """The layers of one window, or those without one, which share a pool. block_bytes: of one block in all of them."""

    layers: tuple[int, ...]
    window: int | None
    block_size: int
    block_bytes: int
    max_step_tokens: int

    def __str__(self) -> str:
        return "layers without a window" if self.window is None else f"layers with a window of {self.window}"

    @cached_property
    def drop_unit(self) -> int:
        """Tokens are given back in multiples of it."""
        return math.lcm(self.block_size, DROP_UNIT)

    @cached_property
    def span_blocks(self) -> int | None:
        """What one sequence needs at most, whatever its length; None without a window.

        The window of the next query, what the unit keeps of the tokens before it, and the tokens of one step.
        """
        if self.window is None:
            return None
        return -(-(self.window - 1 + self.drop_unit - 1 + self.max_step_tokens) // self.block_size)

    def num_dropped(self, num_computed: int | None) -> int:
        """Leading tokens that no query from position num_computed on sees, in whole units; 0 when it is not known."""
        if self.window is None or num_computed is None:
            return 0
        return max(0, num_computed - self.window + 1) // self.drop_unit * self.drop_unit

    def most_blocks(self, num_reading: int, num_decoding: int) -> int | None:
        """What sequences can use that read prompts of any length, and others that decode. None without a window.

        A decoding sequence has the window of its next token, what the unit keeps, and a block for drafts.
        """
        if self.window is None or self.span_blocks is None:
            return None
        window_blocks = -(-(self.window + self.drop_unit - 1) // self.block_size) + 1
        return num_reading * self.span_blocks + num_decoding * window_blocks


def pool_kinds(context: BuildContext, block_size: int) -> tuple[PoolKind, ...]:
    """The model's layers by window, in the order of each one's first layer."""
    spec = context.spec
    value_bytes = context.bytes_per_token // spec.kv_values_per_token
    windows = dict.fromkeys(layer.window for layer in spec.layers)
    groups = [(window, [layer for layer in spec.layers if layer.window == window]) for window in windows]
    return tuple(
        PoolKind(
            layers=tuple(layer.index for layer in layers),
            window=window,
            block_size=block_size,
            block_bytes=sum(token_bytes(one, value_bytes, context.kv_format) for one in layers) * block_size,
            max_step_tokens=min(context.max_step_tokens, context.max_model_len),
        )
        for window, layers in groups
    )


def make_groups(
    name: str, kinds: tuple[PoolKind, ...], context: BuildContext, num_blocks: int | None, num_windows: int
) -> tuple[KVGroup, ...]:
    """A group for each kind, with pools that fit into context.kv_bytes.

    All pools get the same number of blocks, num_blocks or what the budget holds and the seats can use; but one for a
    window no more than num_windows sequences can use of it, all of them reading prompts where the budget holds that
    too, else one of them. PluginError with the numbers when the budget is too small.
    """
    seats_use = -(-context.max_model_len // kinds[0].block_size) * context.max_num_seqs
    wanted = num_blocks or seats_use
    sizes = _sizes(kinds, wanted, num_windows, 0)
    if _cost(kinds, sizes) > context.kv_bytes:
        counts = range(1, wanted + 1)
        costs = partial(_cost_of_count, kinds, num_windows)
        affordable = bisect_right(counts, context.kv_bytes, key=costs)
        if affordable < (num_blocks or 1):
            count = num_blocks or 1
            raise PluginError(
                f"kv '{name}': {count} block(s) of {kinds[0].block_size} tokens need {costs(count)} bytes over all "
                f"layers, the KV budget is {context.kv_bytes}; lower kv.num_blocks or kv.block_size, or raise "
                f"engine.kv_memory"
            )
        sizes = _sizes(kinds, affordable, 1, num_windows - 1)
    return tuple(
        KVGroup(layers=kind.layers, num_blocks=size, window=kind.window)
        for kind, size in zip(kinds, sizes, strict=True)
    )


def _sizes(kinds: tuple[PoolKind, ...], count: int, num_reading: int, num_decoding: int) -> list[int]:
    most = [kind.most_blocks(num_reading, num_decoding) for kind in kinds]
    return [count if one is None else min(count, one) for one in most]


def _cost(kinds: tuple[PoolKind, ...], sizes: list[int]) -> int:
    return sum(size * kind.block_bytes for size, kind in zip(sizes, kinds, strict=True))


def _cost_of_count(kinds: tuple[PoolKind, ...], num_windows: int, count: int) -> int:
    return _cost(kinds, _sizes(kinds, count, 1, num_windows - 1))
