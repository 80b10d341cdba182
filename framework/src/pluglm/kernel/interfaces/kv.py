"""The contracts of KV memory: the manager that hands out blocks (no tensors), and the store that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pluglm.kernel.interfaces.component import Component

if TYPE_CHECKING:
    import torch

    from pluglm.kernel.core import BlockCopies

KV_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """num_blocks blocks of block_size tokens. A contiguous manager has one block per sequence."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Blocks by class; the classes sum to total."""

    total_blocks: int
    free_blocks: int
    held_blocks: int  # distinct blocks in at least one table


class KVTransaction(Protocol):
    """Changes of one step, all or nothing. Nothing is visible to others before commit; rollback undoes everything.

    Sizes are total tokens of the sequence, not increments. An operation that raises has changed nothing. After commit
    or rollback every operation raises RuntimeError (a planner that was given up on may still hold the transaction).
    """

    def acquire(self, sequence_id: int) -> None:
        """Start an empty table. ValueError when the sequence has one."""
        ...

    def extend(self, sequence_id: int, num_tokens: int) -> None:
        """Make room for num_tokens in all (never shrinks). Raises KVExhausted when there is none."""
        ...

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Give back what lies wholly beyond num_tokens."""
        ...

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child starts with the parent's tokens. Shared blocks are copied before either one writes to them."""
        ...

    def release(self, sequence_id: int) -> None:
        """Drop the table. ValueError when there is none (a double release is a bug of the caller)."""
        ...

    def free_blocks(self) -> int:
        """Blocks that could still be handed out inside this transaction."""
        ...

    def commit(self) -> BlockCopies:
        """Make it so; returns (source, target) block copies to do before the step writes."""
        ...

    def rollback(self) -> None:
        """As if it had never been opened."""
        ...


class KVManager(Component, Protocol):
    """Decides which block belongs to which sequence. Pure bookkeeping: it never sees a tensor.

    Everything but a transaction shows the committed state. One transaction is open at a time; opening a second one
    raises RuntimeError.
    """

    @property
    def layout(self) -> KVLayout: ...

    def capacity(self) -> Capacity: ...

    def max_request_tokens(self) -> int:
        """The longest sequence that an empty pool can hold: the answer to "can this ever fit?"."""
        ...

    def transaction(self) -> KVTransaction: ...

    def block_table(self, sequence_id: int) -> tuple[int, ...]:
        """Committed blocks in order. KeyError when the sequence holds none."""
        ...

    def audit(self) -> None:
        """Full check of the books, O(blocks). Raises RuntimeError naming the first thing that does not add up."""
        ...


class KVStore(Protocol):
    """Holds keys and values by slot (= block * block_size + offset). Made by the backend."""

    layout: KVLayout

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks * block_size, K, H], the live storage (a backend without attention may choose K and H)."""
        ...

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks * block_size, K, H], the live storage."""
        ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), all layers, as if all sources were read first."""
        ...
