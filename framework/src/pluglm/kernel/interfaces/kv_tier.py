"""The contract of KV tiers: memory beside the device's, where evicted blocks are kept in case they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from pluglm.kernel.interfaces.component import Component

if TYPE_CHECKING:
    import torch

KV_TIER_VERSION = 1
PERSISTENT = "kv_tier:persistent"  # blocks outlive the process, so keys must mean the same in the next one
LeaseState = Literal["pending", "ok", "failed"]


class Lease(Protocol):
    """One transfer on its way. Whoever asked for it sets the deadline: what is pending then is cancelled, and is late.

    seconds: how long the transfer took, once it is ok. data: of a load that is ok, as it was stored.
    """

    seconds: float
    data: Sequence[torch.Tensor]

    def wait(self, timeout_s: float) -> LeaseState:
        """The state within that many seconds, 0 for at once. Once it is ok or failed it stays so."""
        ...

    def cancel(self) -> None:
        """Nobody asks any more. What completes later is dropped, and nothing is kept for it."""
        ...


class KVTier(Component, Protocol):
    """Keeps blocks by key, as many as its limit allows; it may forget any of them at any time.

    A key is a digest of 32 bytes over all that the block's KV depends on. token_ids, the sequence up to the block's
    end, are kept with it and compared again. Transfers fail and never raise; a tier that raises is used no more.
    """

    def has(self, key: bytes) -> bool:
        """Whether a load would be tried now. No side effects: it is asked often and may lead to nothing."""
        ...

    def store(self, key: bytes, token_ids: Sequence[int], data: Sequence[torch.Tensor]) -> Lease:
        """Keep a block: keys and values of each layer in turn, [block_size, K, H] on the host, which nobody changes."""
        ...

    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        """Fails unless the tier has the whole block, bit for bit as it was stored with these tokens."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...

    def close(self) -> None:
        """The run is over. Called once; what is being stored may be finished or given up."""
        ...
