"""The engine's side of KV memory: guarded transactions, what was adopted and published, copies in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from pluglm.kernel.core import CacheKey, Sequence
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.guard import Watched
from pluglm.kernel.interfaces.kv import KVTransaction

if TYPE_CHECKING:
    from pluglm.kernel.parts import Parts

ResultT = TypeVar("ResultT")


class Attempt(Protocol):
    """(slot, sequences that fail when it fails, call, undo) -> the call's result, or None when it failed."""

    def __call__(
        self, slot: str, touched: Iterable[Sequence], call: Callable[[], ResultT], undo: Callable[[], Any] = tuple
    ) -> ResultT | None: ...


class StepKV:
    """The transaction that a scheduler works in. adopted: tokens that each sequence's `acquire` gave it from the cache.

    The plan is checked against what the manager said, not against what the scheduler makes of it.
    """

    def __init__(self, transaction: Any, name: str) -> None:
        self._transaction, self._name = transaction, name
        self.adopted: dict[int, int] = {}
        self.extend, self.trim, self.fork = transaction.extend, transaction.trim, transaction.fork
        self.free_blocks, self.commit = transaction.free_blocks, transaction.commit

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        num_adopted = self._transaction.acquire(sequence_id, key)
        limit = 0 if key is None else key.limit
        if not isinstance(num_adopted, int) or not 0 <= num_adopted <= limit:
            raise ComponentFailure(self._name, f"acquire returned {num_adopted!r}, 0 to {limit} tokens may be adopted")
        self.adopted[sequence_id] = num_adopted
        return num_adopted

    def release(self, sequence_id: int) -> None:
        self._transaction.release(sequence_id)
        self.adopted.pop(sequence_id, None)


class Memory:
    """KV of live sequences. Blocks of ended ones go back once no abandoned call can write to them any more."""

    def __init__(self, parts: Parts, attempt: Attempt) -> None:
        self.kv = parts.runner.kv
        self.held_back: list[int] = []  # ended sequences that still hold blocks
        self._parts, self._attempt = parts, attempt
        self._cache = parts.prefix_cache
        self._block_size = self.kv.layout.block_size
        self._host_bytes_left = parts.limits.offload_bytes

    def change(self, slot: str, touched: Iterable[Sequence], change: Callable[[Any], ResultT]) -> ResultT | None:
        """change(transaction) as an attempt; the transaction that it does not commit is rolled back."""
        opened: list[KVTransaction] = []

        def run() -> ResultT:
            opened.append(self.kv.transaction())
            return change(Watched(opened[0], self._parts.guard, self._parts.names["kv"]))

        def roll_back() -> None:
            for transaction in opened:
                with suppress(RuntimeError):  # an abandoned call may have closed it
                    transaction.rollback()

        return self._attempt(slot, touched, run, lambda: self._attempt("kv", (), roll_back))

    def held_tokens(self, sequence_id: int) -> int:
        """Tokens that a sequence's committed KV has room for."""
        try:
            return len(self.kv.block_table(sequence_id)) * self._block_size
        except KeyError:
            return 0

    def fork(self, parent: Sequence, children: list[Sequence], num_tokens: int) -> bool:
        """Children that share the parent's first num_tokens computed tokens; False when that failed the request."""

        def fork(kv: Any) -> bool:
            for child in children:
                kv.fork(parent.sequence_id, child.sequence_id)
                kv.trim(child.sequence_id, num_tokens)
            kv.commit()
            return True

        return self.change("kv", [parent], fork) is True

    def trim(self, sequences: list[Sequence]) -> None:
        """Give back what was held for drafts that came to nothing."""

        def trim(kv: Any) -> None:
            for sequence in sequences:
                kv.trim(sequence.sequence_id, sequence.num_computed)
            kv.commit()

        self.change("kv", sequences, trim)

    def publish(self, sequences: Iterable[Sequence], last: bool = False) -> None:
        """Offer computed tokens to the prefix cache: full blocks as they come, and the rest when the KV goes.

        Only tokens that finite logits were computed behind: what a faulty step stored must not outlive its request.
        """
        cache, size = self._cache, self._block_size
        if cache is None:
            return
        ready = [
            one
            for one in sequences
            if one.num_sound > one.num_published and (last or one.num_sound // size > one.num_published // size)
        ]

        def publish() -> None:
            for one in ready:
                cache.publish(one.sequence_id, CacheKey(one.namespace, one.token_ids, one.num_sound))
                one.num_published = one.num_sound

        if ready:
            self._attempt("kv", ready, publish)

    def reset_cache(self) -> None:
        """Forget every cached prefix."""
        if (cache := self._cache) is not None:
            self._attempt("kv", (), cache.reset)

    def offload(self, sequence: Sequence, blocks: tuple[int, ...]) -> bool:
        """Copy released blocks to host memory before anything writes to them; False when there is no room for it."""
        store, layers = self._parts.runner.store, len(self._parts.runner.spec.layers)
        saved = self._attempt("backend", (), partial(read_blocks, store, layers, blocks))
        num_bytes = 0 if saved is None else sum(one.nbytes for one in saved)
        if saved is None or num_bytes > self._host_bytes_left:
            return False
        self._host_bytes_left -= num_bytes
        sequence.offloaded = saved
        return True

    def take_offloaded(self, sequence: Sequence) -> list[torch.Tensor] | None:
        """What was copied of it, which the host forgets."""
        saved: list[torch.Tensor] | None = sequence.offloaded
        if saved is not None:
            self._host_bytes_left += sum(one.nbytes for one in saved)
            sequence.offloaded = None
        return saved

    def give_back(self, sequence: Sequence) -> None:
        """The KV of an ended sequence, also what a failed plan may have left it with."""
        self.take_offloaded(sequence)
        self.held_back.append(sequence.sequence_id)
        self.return_held_back()

    def return_held_back(self) -> None:
        if not self.held_back or not self._parts.guard.settled:
            return
        held, self.held_back = self.held_back, []

        def release(kv: Any) -> bool:
            for sequence_id in held:
                with suppress(ValueError):  # it holds none
                    kv.release(sequence_id)
            kv.commit()
            return True

        if self.change("kv", (), release) is None:
            self.held_back = held  # tried again with the next step


@torch.inference_mode()
def read_blocks(store: Any, num_layers: int, blocks: tuple[int, ...]) -> list[torch.Tensor]:
    """Keys and values of each layer in turn, [blocks, block_size, K, H], in host memory."""
    index = torch.tensor(blocks, dtype=torch.int64)
    return [
        _by_block(stored, store).index_select(0, index.to(stored.device)).to("cpu")
        for layer in range(num_layers)
        for stored in (store.keys(layer), store.values(layer))
    ]


@torch.inference_mode()
def write_blocks(store: Any, blocks: tuple[int, ...], saved: list[torch.Tensor]) -> None:
    """The inverse of read_blocks, into as many blocks."""
    index = torch.tensor(blocks, dtype=torch.int64)
    for number, data in enumerate(saved):
        stored = (store.values if number % 2 else store.keys)(number // 2)
        _by_block(stored, store).index_copy_(0, index.to(stored.device), data.to(stored.device))


def _by_block(stored: torch.Tensor, store: Any) -> torch.Tensor:
    return stored.view(store.layout.num_blocks, store.layout.block_size, *stored.shape[1:])
