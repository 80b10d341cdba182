"""Reads KV out of a prefix cache and puts KV into it, between steps and through the contracts alone.

Both work on a temporary sequence, so nothing that others hold is written to, and nothing is evicted while it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from pluglm.kernel.core import BlockCopies, CacheKey
from pluglm.kernel.engine import EngineCore
from pluglm.kernel.errors import ComponentFailure, KVExhausted
from pluglm.kernel.interfaces.kv import KVStore, PrefixCache
from pluglm.kernel.interfaces.kv_format import PART_NAMES, stored_parts
from pluglm.kernel.memory import StepKV

# T: tokens, K: kv heads

ResultT = TypeVar("ResultT")


class CacheAccess:
    """One engine's prefix cache. Raises ComponentFailure when the KV manager or the backend fails."""

    def __init__(self, core: EngineCore, cache: PrefixCache) -> None:
        self._core, self._cache = core, cache
        self._store, self._names = core.parts.runner.store, core.parts.names
        self._layers = range(len(core.parts.runner.spec.layers))

    def shapes(self, num_tokens: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Of the parts of each layer in turn, for so many tokens."""
        stored = _parts(self._store, self._layers)
        return [(one.dtype, (num_tokens, *one.shape[1:])) for one in stored]

    def part_names(self) -> list[str]:
        """Of the same tensors."""
        counts = [len(stored_parts(self._store, layer)) for layer in self._layers]
        return [f"{name}.{layer}" for layer, count in enumerate(counts) for name in PART_NAMES[:count]]

    def probe(self, key: CacheKey) -> int:
        """Tokens that could be adopted now."""
        return int(_required(self._core.attempt("kv", (), lambda: self._cache.probe(key)), self._names["kv"]))

    def read(self, key: CacheKey) -> list[torch.Tensor]:
        """The parts of each layer in turn, [T, K, numbers] on the host, of the longest cached prefix; [] if none is."""
        sequence_id = self._core.roster.new_id()

        def adopt(transaction: Any) -> int:
            num_tokens = StepKV(transaction, self._names["kv"]).acquire(sequence_id, key)
            transaction.commit()
            return num_tokens

        def copy() -> list[torch.Tensor]:
            slots = self._slots(sequence_id, 0, num_tokens)
            return read_slots(self._store, self._layers, slots) if num_tokens else []

        try:
            num_tokens = _required(self._change(adopt), self._names["kv"])
            data: list[torch.Tensor] = _required(self._core.attempt("backend", (), copy), self._names["backend"])
            return data
        finally:
            self._give_back(sequence_id)

    def read_blocks(self, blocks: Sequence[int]) -> list[list[torch.Tensor]]:
        """Of each block: the parts of each layer in turn, [block_size, K, numbers] on the host, in its own memory."""
        size = self._core.kv.layout.block_size
        slots = torch.tensor([block * size + offset for block in blocks for offset in range(size)], dtype=torch.int64)
        read = partial(read_slots, self._store, self._layers, slots)
        stored = [one.split(size) for one in _required(self._core.attempt("backend", (), read), self._names["backend"])]
        return [[one[number].clone() for one in stored] for number in range(len(blocks))]

    def fill(self, key: CacheKey, data: Sequence[torch.Tensor], start: int = 0) -> str:
        """Make the key's first key.limit tokens adoptable; returns why that cannot be, or nothing.

        data: what `read` gives, of those tokens from number `start` on; the ones before it must be cached already. Idle
        cached blocks are evicted for it, as for any request.
        """
        sequence_id = self._core.roster.new_id()
        try:
            made = self._change(partial(self._make_room, sequence_id, key, start))
            made = _required(made, self._names["kv"])
            if isinstance(made, str):
                return made
            self._core.parts.tiers.after_commit(self._core)
            write = partial(self._write, sequence_id, range(start, key.limit), made, data)
            _required(self._core.attempt("backend", (), write), self._names["backend"])
            publish = partial(self._publish, sequence_id, key)
            _required(self._core.attempt("kv", (), publish), self._names["kv"])
            return ""
        finally:
            self._give_back(sequence_id)

    def _change(self, change: Callable[[Any], ResultT]) -> ResultT | None:
        core = self._core
        return core.parts.guard.run(core.memory.changing("kv", (), change))

    def _make_room(
        self, sequence_id: int, key: CacheKey, start: int, transaction: Any
    ) -> str | tuple[int, BlockCopies]:
        """Tokens that are cached already, and the copies to make before the rest is written."""
        kv = StepKV(transaction, self._names["kv"])
        try:
            num_adopted = kv.acquire(sequence_id, key)
            if num_adopted < start:
                transaction.rollback()
                return f"only {num_adopted} of the {start} tokens before it are cached"
            kv.extend(sequence_id, key.limit)
        except KVExhausted as full:
            transaction.rollback()
            return str(full)
        return num_adopted, kv.commit()

    def _write(
        self, sequence_id: int, given: range, made: tuple[int, BlockCopies], data: Sequence[torch.Tensor]
    ) -> bool:
        """Copies, then those of the given tokens that were not cached."""
        num_adopted, copies = made
        self._store.copy_blocks(copies)
        if num_adopted < given.stop:
            slots = self._slots(sequence_id, num_adopted, given.stop)
            write_slots(self._store, self._layers, slots, [one[num_adopted - given.start :] for one in data])
        return True

    def _publish(self, sequence_id: int, key: CacheKey) -> bool:
        self._cache.publish(sequence_id, key)
        return True

    def _slots(self, sequence_id: int, start: int, stop: int) -> torch.Tensor:
        kv = self._core.kv
        size, table = kv.layout.block_size, kv.block_table(sequence_id)
        return torch.tensor([table[p // size] * size + p % size for p in range(start, stop)], dtype=torch.int64)

    def _give_back(self, sequence_id: int) -> None:
        self._core.memory.held_back.append(sequence_id)
        self._core.memory.return_held_back()


@torch.inference_mode()
def read_slots(store: KVStore, layers: range, slots_T: torch.Tensor) -> list[torch.Tensor]:
    """The parts of each layer in turn, [T, K, numbers], in host memory."""
    return [one.index_select(0, slots_T.to(one.device)).to("cpu") for one in _parts(store, layers)]


@torch.inference_mode()
def write_slots(store: KVStore, layers: range, slots_T: torch.Tensor, data: Sequence[torch.Tensor]) -> None:
    """The inverse of read_slots, into as many slots."""
    for stored, one in zip(_parts(store, layers), data, strict=True):
        stored.index_copy_(0, slots_T.to(stored.device), one.to(stored.device))


def _parts(store: KVStore, layers: range) -> list[torch.Tensor]:
    """Live storage, a layer at a time; see stored_parts."""
    return [one for layer in layers for one in stored_parts(store, layer)]


def _required(result: Any, name: str) -> Any:
    """What a guarded call returned; one that failed said so in the log and returned None."""
    if result is None:
        raise ComponentFailure(name, "failed; the log has its message")
    return result
