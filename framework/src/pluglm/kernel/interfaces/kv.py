"""The contracts of KV memory: the manager that hands out blocks (no tensors), and the store that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from pluglm.kernel.interfaces.component import Component

if TYPE_CHECKING:
    import torch

    from pluglm.kernel.core import BlockCopies, CacheKey

KV_VERSION = 2
WHOLE_REGIONS = (
    "kv:whole_regions"  # all KV of a sequence is in one block, so a fork that is written to copies all of it
)
DROP_UNIT = 64  # tokens that a group gives back are a multiple of it, so an attention may tile keys by up to as many


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers with block tables and a pool of their own. window: of each of these layers, None is all."""

    layers: tuple[int, ...]
    num_blocks: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """num_blocks blocks of block_size tokens. A contiguous manager has one block per sequence.

    groups: of a manager with LayerGroups, each layer in one of them; a group's blocks are numbered behind those of the
    groups before it, so num_blocks is their sum. Empty: one table serves every layer.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Blocks by class; the classes sum to total."""

    total_blocks: int
    free_blocks: int
    held_blocks: int  # distinct blocks in at least one table
    cached_blocks: int = 0  # in no table, kept because a later request may adopt them; evicted when room is needed


class KVTransaction(Protocol):
    """Changes of one step, all or nothing. Nothing is visible to others before commit; rollback undoes everything.

    Sizes are total tokens of the sequence, not increments. An operation that raises has changed nothing. After commit
    or rollback every operation raises RuntimeError (a planner that was given up on may still hold the transaction).
    """

    def acquire(self, sequence_id: int, key: CacheKey | None = None) -> int:
        """Start a table. ValueError when the sequence has one.

        With a key, a manager that reuses prefixes begins it with blocks that hold the KV of the longest cached prefix
        of key.token_ids, of key.limit tokens at most. Returns how many tokens that are; 0 is an empty table. The next
        `extend` makes what will be written exclusive.
        """
        ...

    def extend(self, sequence_id: int, num_tokens: int, evict: bool = True) -> None:
        """Make room for num_tokens in all (never shrinks). Raises KVExhausted when there is none.

        Without `evict` no cached block is given up for it.
        """
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

    def free_blocks(self, evict: bool = True) -> int:
        """Blocks that could still be handed out inside this transaction; without `evict`, leaving the cache whole."""
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


@runtime_checkable
class PrefixCache(Protocol):
    """Optional ability of a KVManager: blocks of one sequence serve later ones that begin with the same tokens.

    Source of the method: PagedAttention (arXiv:2309.06180) for shared blocks, SGLang's RadixAttention
    (arXiv:2312.07104) for reuse across requests.
    """

    def probe(self, key: CacheKey) -> int:
        """Tokens that `acquire` would adopt of the committed state; while a transaction evicts, it may adopt fewer.

        No side effects: it is called often and may lead to nothing.
        """
        ...

    def publish(self, sequence_id: int, key: CacheKey) -> None:
        """The first key.limit tokens of key.token_ids are in the sequence's committed table, computed and final.

        Called outside transactions (RuntimeError inside one), again with more tokens as they come, and a last time
        before the release, so that a manager may keep a partly filled block from there on. Published blocks outlive
        the sequence until evicted. The table may come out with other blocks of the same content. ValueError when the
        table is shorter.
        """
        ...

    def reset(self) -> None:
        """Forget everything cached, outside transactions. Blocks still in tables stay there.

        What a sequence that holds a table now publishes later is ignored: weights may have changed since it began.
        """
        ...


class GroupTable(NamedTuple):
    """A sequence's blocks in one group, counted from the group's first block, behind num_dropped leading tokens."""

    num_dropped: int
    blocks: tuple[int, ...]


@runtime_checkable
class LayerGroups(Protocol):
    """Optional ability of a KVManager, and there when its layout has groups: layers with a window keep little more.

    `block_table` then has the blocks of all groups in turn, as the layout numbers them, and says nothing of positions.
    Transactions are GroupTransactions. Such a manager needs the tag `kv:layer_groups`, which a backend provides.
    """

    def group_tables(self, sequence_id: int) -> tuple[GroupTable, ...]:
        """Committed tables in the order of layout.groups. KeyError when the sequence holds none.

        num_dropped is a multiple of the block size and of DROP_UNIT, and no query to come sees any of those tokens.
        """
        ...


class GroupTransaction(KVTransaction, Protocol):
    """A transaction over several groups: every operation changes all of them or raises and changes none.

    free_blocks is that of the group with the fewest, since a new sequence takes a block of each. A sequence that was
    never advanced keeps all its tokens and may be trimmed to any length.
    """

    def advance(self, sequence_id: int, num_computed: int) -> None:
        """The first num_computed tokens are stored and no query will come before them: give back what none will see.

        From now on the sequence is advanced before every step and computes at most max_step_tokens in one, so that a
        group with a window need not have blocks for all of a long prompt at once; `extend` still promises them, and
        `max_request_tokens` counts on it. ValueError when what such a sequence would see was given back already.
        """
        ...


class EvictedBlock(NamedTuple):
    """A whole block that the cache knows no more. token_ids: of its sequence, up to the block's end."""

    block: int
    namespace: bytes
    token_ids: tuple[int, ...]


@runtime_checkable
class EvictionLog(Protocol):
    """Optional ability of a PrefixCache: it says what it gave up, so that the content can be kept elsewhere."""

    def take_evicted(self) -> Sequence[EvictedBlock]:
        """What was evicted since the last call; nothing is kept before the first one, nor over a reset.

        Called after every commit that may have evicted and before anything is written, so the content is still there.
        """
        ...


class KVStore(Protocol):
    """Holds keys and values by slot (= block * block_size + offset). Made by the backend.

    With groups, num_blocks below is that of the layer's group and blocks are counted within it.
    """

    layout: KVLayout

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks * block_size, K, H], the live storage (a backend without attention may choose K and H)."""
        ...

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks * block_size, K, H], the live storage."""
        ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), all layers, as if all sources were read first.

        With groups, blocks are numbered as in the layout, and a pair is of the layers of its group.
        """
        ...
