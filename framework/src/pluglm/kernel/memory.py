"""The engine's side of KV memory: guarded transactions, what was adopted and published, copies in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from pluglm.kernel.core import CacheKey, Sequence, StepView
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.guard import Guarded, Watched
from pluglm.kernel.interfaces.kv import GroupTable, KVTransaction
from pluglm.kernel.interfaces.kv_format import stored_parts

if TYPE_CHECKING:
    from pluglm.kernel.engine import EngineCore
    from pluglm.kernel.parts import Parts

ResultT = TypeVar("ResultT")


class StepKV:
    """The transaction that a scheduler works in. adopted: tokens that each sequence's `acquire` gave it from the cache.

    The plan is checked against what the manager said, not against what the scheduler makes of it.
    """

    def __init__(self, transaction: Any, name: str) -> None:
        self._transaction, self._name = transaction, name
        self.adopted: dict[int, int] = {}
        self._computed: dict[int, int] | None = None
        self.extend = transaction.extend

    def __getattr__(self, name: str) -> Any:
        """The others are looked up when they are asked for, which most steps do not."""
        if name not in ("trim", "fork", "free_blocks", "commit"):
            raise AttributeError(name)
        return getattr(self._transaction, name)

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        num_adopted = self._transaction.acquire(sequence_id, key)
        limit = 0 if key is None else key.limit
        if not isinstance(num_adopted, int) or not 0 <= num_adopted <= limit:
            raise ComponentFailure(self._name, f"acquire returned {num_adopted!r}, 0 to {limit} tokens may be adopted")
        self.adopted[sequence_id] = num_adopted
        if self._computed is not None:
            self._transaction.advance(sequence_id, num_adopted or self._computed.get(sequence_id, 0))
        return num_adopted

    def advance(self, view: StepView) -> None:
        """Tell a manager with groups of layers how far every sequence is, also those that are yet to be acquired."""
        views = (*view.running, *view.waiting)
        self._computed = {one.sequence_id: one.num_computed for one in views}
        for one in views:
            if one.holds_kv:
                self._transaction.advance(one.sequence_id, one.num_computed)

    def release(self, sequence_id: int) -> None:
        self._transaction.release(sequence_id)
        self.adopted.pop(sequence_id, None)


class Memory:
    """KV of live sequences. Blocks of ended ones go back once no abandoned call can write to them any more."""

    def __init__(self, parts: Parts, engine: EngineCore) -> None:
        self.kv = parts.runner.kv
        self.held_back: list[int] = []  # ended sequences that still hold blocks
        self.cache_epoch = 0  # resets of the prefix cache
        self._parts, self._engine = parts, engine
        self._cache = parts.prefix_cache
        self._block_size, self._groups = self.kv.layout.block_size, self.kv.layout.groups
        self._host_bytes_left = parts.limits.offload_bytes

    def apply(self, touched: Iterable[Sequence], change: Callable[[Any], object]) -> bool:
        """change(transaction) and its commit; False when that failed, and was rolled back."""
        return self._parts.guard.run(self.changing("kv", touched, partial(_committed, change))) is True

    def changing(
        self, slot: str, touched: Iterable[Sequence], change: Callable[[Any], ResultT]
    ) -> Guarded[ResultT | None]:
        """change(transaction) as an attempt under the guard; the transaction that it does not commit is rolled back."""
        opened: list[KVTransaction] = []

        def run() -> ResultT:
            opened.append(self.kv.transaction())
            return change(Watched(opened[0], self._parts.guard, self._parts.names["kv"]))

        def undo() -> None:
            for transaction in opened:
                with suppress(RuntimeError):  # an abandoned call may have closed it
                    transaction.rollback()

        return (yield from self._engine.attempting(slot, touched, run, lambda: self._engine.attempt("kv", (), undo)))

    def held_tokens(self, sequence_id: int) -> int:
        """Tokens that a sequence's committed KV has room for."""
        try:
            if not self._groups:
                return len(self.kv.block_table(sequence_id)) * self._block_size
            tables = self._group_tables(sequence_id)
        except KeyError:
            return 0
        return min(one.num_dropped + len(one.blocks) * self._block_size for one in tables)

    def holds_any(self, sequence_id: int, blocks: set[int]) -> bool:
        """Whether one of these blocks is the sequence's; yes when its manager cannot say."""
        try:
            return not blocks.isdisjoint(self.kv.block_table(sequence_id))
        except Exception:  # a plugin's, while another failure is dealt with
            return True

    def layer_tables(self, sequence_id: int) -> tuple[GroupTable, ...]:
        """A sequence's committed table for each layer of the model."""
        tables = self._group_tables(sequence_id)
        if not self._groups:
            return tables * len(self._parts.runner.spec.layers)
        of_layer = {layer: one for group, one in zip(self._groups, tables, strict=True) for layer in group.layers}
        return tuple(of_layer[layer] for layer in sorted(of_layer))

    def _group_tables(self, sequence_id: int) -> tuple[GroupTable, ...]:
        manager: Any = self.kv
        return manager.group_tables(sequence_id) if self._groups else (GroupTable(0, manager.block_table(sequence_id)),)

    def fork(self, parent: Sequence, children: list[Sequence], num_tokens: int) -> bool:
        """Children that share the parent's first num_tokens computed tokens; False when that failed the request."""

        def fork(kv: Any) -> None:
            kv.trim(parent.sequence_id, parent.num_computed)  # room to spare would be shared and written to
            for child in children:
                kv.fork(parent.sequence_id, child.sequence_id)
                kv.trim(child.sequence_id, num_tokens)

        return self.apply([parent], fork)

    def trim(self, sequences: list[Sequence]) -> Guarded[bool | None]:
        """Give back what was held for drafts that came to nothing."""
        trim = partial(_committed, lambda kv: [kv.trim(one.sequence_id, one.num_computed) for one in sequences])
        return self.changing("kv", sequences, trim)

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
            if one.kv_epoch == self.cache_epoch
            and one.num_sound > one.num_published
            and (last or one.num_sound // size > one.num_published // size)
        ]

        def publish() -> None:
            for one in ready:
                cache.publish(one.sequence_id, CacheKey(one.namespace, one.token_ids, one.num_sound))
                one.num_published = one.num_sound

        if ready:
            self._engine.attempt("kv", ready, publish)

    def reset_cache(self) -> None:
        """Forget every cached prefix, and those that live sequences have computed so far."""
        self.cache_epoch += 1
        if (cache := self._cache) is not None:
            self._engine.attempt("kv", (), cache.reset)

    def offload(self, sequence: Sequence, tables: tuple[GroupTable, ...]) -> bool:
        """Copy released blocks to host memory before anything writes to them; False when there is no room for it."""
        read = partial(read_blocks, self._parts.runner.store, tables, sequence.num_computed)
        saved = self._engine.attempt("backend", (), read)
        num_bytes = 0 if saved is None else sum(one.nbytes for one in saved.data)
        if saved is None or num_bytes > self._host_bytes_left:
            return False
        self._host_bytes_left -= num_bytes
        sequence.offloaded = saved
        return True

    def take_offloaded(self, sequence: Sequence) -> Saved | None:
        """What was copied of it, which the host forgets."""
        saved: Saved | None = sequence.offloaded
        if saved is not None:
            self._host_bytes_left += sum(one.nbytes for one in saved.data)
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

        def release(kv: Any) -> None:
            for sequence_id in held:
                with suppress(ValueError):  # it holds none
                    kv.release(sequence_id)

        if not self.apply((), release):
            self.held_back = held  # tried again with the next step


class Saved(NamedTuple):
    """KV in host memory: the parts of each layer in turn (see stored_parts), [blocks, block_size, K, numbers].

    num_dropped: by layer, the leading tokens that are not among them.
    """

    num_dropped: tuple[int, ...]
    data: list[torch.Tensor]


def _committed(change: Callable[[Any], object], transaction: Any) -> bool:
    change(transaction)
    transaction.commit()
    return True


@torch.inference_mode()
def read_blocks(store: Any, tables: tuple[GroupTable, ...], num_tokens: int) -> Saved:
    """What each layer's table holds of num_tokens; the rest of it is room that nothing was written to."""
    data: list[torch.Tensor] = []
    for layer, (num_dropped, blocks) in enumerate(tables):
        num_blocks = -(-(num_tokens - num_dropped) // store.layout.block_size)
        index = torch.tensor(blocks[:num_blocks], dtype=torch.int64)
        stored = (_by_block(one, store) for one in stored_parts(store, layer))
        data += [one.index_select(0, index.to(one.device)).to("cpu") for one in stored]
    return Saved(tuple(table.num_dropped for table in tables), data)


@torch.inference_mode()
def write_blocks(store: Any, tables: tuple[GroupTable, ...], saved: Saved) -> None:
    """The inverse of read_blocks, into tables that may have dropped more since."""
    data = iter(saved.data)
    for layer, (num_dropped, blocks) in enumerate(tables):
        num_gone = (num_dropped - saved.num_dropped[layer]) // store.layout.block_size
        for stored in stored_parts(store, layer):
            kept = next(data)[num_gone:]
            index = torch.tensor(blocks[: len(kept)], dtype=torch.int64, device=stored.device)
            _by_block(stored, store).index_copy_(0, index, kept.to(stored.device))


def _by_block(stored: torch.Tensor, store: Any) -> torch.Tensor:
    return stored.view(-1, store.layout.block_size, *stored.shape[1:])
