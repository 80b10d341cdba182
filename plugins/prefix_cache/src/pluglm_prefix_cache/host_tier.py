"""A KV tier in host memory: what was stored or loaded last stays, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from pydantic import Field

from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.kv_tier import KVTier, Lease, LeaseState

_BYTES_PER_ID = 8


class HostTierConfig(ComponentConfig):
    """bytes: of host memory, for tensors and token ids."""

    bytes: int = Field(default=1 << 30, ge=0)


class _Done:
    """A lease that was over before anybody asked."""

    seconds = 0.0  # nothing is copied; what it takes to fill the cache is measured there

    def __init__(self, state: LeaseState, data: Sequence[torch.Tensor] = ()) -> None:
        self.data = data
        self._state = state

    def wait(self, timeout_s: float) -> LeaseState:
        return self._state

    def cancel(self) -> None:
        self.data = ()


class HostTier(KVTier):
    """Evicted KV in host memory. What was stored or loaded the longest time ago goes first."""

    interface_version = 1
    Config = HostTierConfig

    def __init__(self, config: HostTierConfig, context: BuildContext) -> None:
        self._bytes = self._bytes_left = config.bytes
        self._blocks: OrderedDict[bytes, tuple[tuple[int, ...], list[torch.Tensor]]] = OrderedDict()

    def has(self, key: bytes) -> bool:
        return key in self._blocks

    def store(self, key: bytes, token_ids: Sequence[int], data: Sequence[torch.Tensor]) -> Lease:
        block = (tuple(token_ids), list(data))
        if key in self._blocks:
            self._drop(key)
        num_bytes = _num_bytes(*block)
        if num_bytes > self._bytes:
            return _Done("failed")
        while num_bytes > self._bytes_left:
            self._drop(next(iter(self._blocks)))
        self._blocks[key] = block
        self._bytes_left -= num_bytes
        return _Done("ok")

    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        known, data = self._blocks.get(key, ((), []))
        if not data or known != tuple(token_ids):
            return _Done("failed")
        self._blocks.move_to_end(key)
        return _Done("ok", data)

    def clear(self) -> None:
        for key in list(self._blocks):
            self._drop(key)

    def close(self) -> None:
        self.clear()

    def _drop(self, key: bytes) -> None:
        self._bytes_left += _num_bytes(*self._blocks.pop(key))


def _num_bytes(token_ids: Sequence[int], data: Sequence[torch.Tensor]) -> int:
    return _BYTES_PER_ID * len(token_ids) + sum(one.nbytes for one in data)
