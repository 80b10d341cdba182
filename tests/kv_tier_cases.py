"""Helpers of the tests of KV tiers: tiers whose transfers take as long as wanted, and a run with a small pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_cases import fake_config, ids
from kv_file_cases import cached

from pluglm import Engine, RunConfig
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.kv_tier import Lease, LeaseState
from pluglm_prefix_cache.host_tier import HostTier, HostTierConfig

HOST = {"use": "pluglm_prefix_cache.host_tier:HostTier"}
PROMPTS = [ids(*range(start, start + 40)) for start in (5, 60, 120)]
BLOCK_SIZE, NUM_BLOCKS = 4, 14  # one prompt with its output fits, two do not


def disk(path: Path, **keys: Any) -> dict[str, Any]:
    return {"use": "pluglm_prefix_cache.disk_tier:DiskTier", "path": str(path), **keys}


def tiered(model: Path, *tiers: Any, use: str = "hash_prefix", make: Any = fake_config, **slots: Any) -> RunConfig:
    """A timeout that no disk reaches, unless a test wants another one."""
    kv = {"num_blocks": NUM_BLOCKS, **slots.pop("kv", {})}
    engine = {"kv_tier_timeout_s": 60.0, **slots.pop("engine", {})}
    return cached(model, use, BLOCK_SIZE, make, kv=kv, kv_tiers=list(tiers), engine=engine, **slots)


def tier_of(engine: Engine) -> Any:
    """The first tier's object."""
    tiers: Any = engine._core.parts.tiers
    return next(iter(tiers._tiers.tiers.values()))._target


class TimedConfig(HostTierConfig):
    seconds: float


class TimedLease:
    """Over at once, and says that it took so long."""

    def __init__(self, lease: Lease, seconds: float) -> None:
        self.data, self.seconds = lease.data, seconds
        self._lease = lease

    def wait(self, timeout_s: float) -> LeaseState:
        return self._lease.wait(timeout_s)

    def cancel(self) -> None:
        self._lease.cancel()


class TimedTier(HostTier):
    """A host tier whose loads say that they take `seconds` a block."""

    Config = TimedConfig

    def __init__(self, config: TimedConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.seconds = config.seconds

    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        return TimedLease(super().load(key, token_ids), self.seconds)


class OpenLease:
    """Pending until somebody sets its state; counts who gives it up."""

    seconds = 0.001

    def __init__(self, lease: Lease) -> None:
        self.state: LeaseState = "pending"
        self.num_cancels = 0
        self.lease = lease

    @property
    def data(self) -> Sequence[torch.Tensor]:
        return self.lease.data

    def wait(self, timeout_s: float) -> LeaseState:
        return self.state

    def cancel(self) -> None:
        self.num_cancels += 1


class OpenTier(HostTier):
    """A host tier whose transfers end when the test says so. stores: whether that goes for stores too."""

    class Config(HostTierConfig):
        stores: bool = False

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__(config, context)
        self.leases: list[OpenLease] = []
        self._stores = config.stores

    def store(self, key: bytes, token_ids: Sequence[int], data: Sequence[torch.Tensor]) -> Lease:
        lease = super().store(key, token_ids, data)
        return self._open(lease) if self._stores else lease

    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        return self._open(super().load(key, token_ids))

    def _open(self, lease: Lease) -> OpenLease:
        self.leases.append(OpenLease(lease))
        return self.leases[-1]


class FaultyConfig(HostTierConfig):
    """method: the one that fails; tensors: what is wrong with what a load gives."""

    method: str = ""
    tensors: str = ""


class FaultyLease:
    seconds = 0.0

    def __init__(self, lease: Lease, config: FaultyConfig) -> None:
        self._lease, self._config = lease, config
        self.data: Any = _spoiled(list(lease.data), config.tensors)

    def wait(self, timeout_s: float) -> LeaseState:
        if self._config.method == "wait":
            raise OSError("no wait")
        return "failed" if self._config.method == "lease" else self._lease.wait(timeout_s)

    def cancel(self) -> None:
        self._lease.cancel()


def _spoiled(data: list[torch.Tensor], how: str) -> Any:
    changes: dict[str, Any] = {
        "": lambda: data,
        "few": lambda: data[:-1],
        "dtype": lambda: [one.to(torch.float64) for one in data],
        "shape": lambda: [one[:1] for one in data],
        "none": lambda: [None for _ in data],
    }
    return changes[how]()


class FaultyTier(HostTier):
    Config = FaultyConfig

    def __init__(self, config: FaultyConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.config = config

    def _fail(self, method: str) -> None:
        if method == self.config.method:
            raise OSError(f"no {method}")

    def has(self, key: bytes) -> bool:
        self._fail("has")
        return super().has(key)

    def store(self, key: bytes, token_ids: Sequence[int], data: Sequence[torch.Tensor]) -> Lease:
        self._fail("store")
        return super().store(key, token_ids, data)

    def load(self, key: bytes, token_ids: Sequence[int]) -> Lease:
        self._fail("load")
        return FaultyLease(super().load(key, token_ids), self.config)

    def clear(self) -> None:
        self._fail("clear")
        super().clear()

    def close(self) -> None:
        self._fail("close")
        super().close()
