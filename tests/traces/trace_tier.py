"""A KV tier on the clock of a trace: transfers take steps, and some fail or come late. Repeatable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from pluglm.kernel.interfaces.kv_tier import LeaseState

TIMEOUT_S = 0.1  # of all loads of a sequence together, and of a store


@dataclass(slots=True)
class TraceLease:
    """On its way until ready_s. arrives: what happens then, and whether it went well."""

    now: Callable[[], float]
    ready_s: float
    arrives: Callable[[], bool]
    seconds: float
    data: Sequence[torch.Tensor] = ()
    state: LeaseState = "pending"

    def wait(self, timeout_s: float) -> LeaseState:
        """Nobody waits for a clock that only the engine moves."""
        if self.state == "pending" and self.now() >= self.ready_s:
            self.state = "ok" if self.arrives() else "failed"
        return self.state

    def cancel(self) -> None:
        self.state = "failed" if self.state == "pending" else self.state


@dataclass(slots=True)
class TraceTier:
    """delay_s: of every transfer. fails: one of so many loads fails, 0 is none. token_s: what a load says it cost."""

    now: Callable[[], float]
    delay_s: float = 0.0
    fails: int = 0
    token_s: float = 0.0
    num_loads: int = 0
    kept: dict[bytes, tuple[tuple[int, ...], list[torch.Tensor]]] = field(default_factory=dict)

    def has(self, key: bytes) -> bool:
        return key in self.kept

    def store(self, key: bytes, token_ids: Sequence[int], data: Sequence[torch.Tensor]) -> TraceLease:
        def arrives() -> bool:
            self.kept[key] = tuple(token_ids), list(data)
            return True

        return TraceLease(self.now, self.now() + self.delay_s, arrives, self.delay_s)

    def load(self, key: bytes, token_ids: Sequence[int]) -> TraceLease:
        self.num_loads += 1
        tokens, data = self.kept.get(key, ((), []))
        is_right = tokens == tuple(token_ids) and not (self.fails and self.num_loads % self.fails == 0)
        seconds = self.token_s * (len(data[0]) if data else 1)
        return TraceLease(self.now, self.now() + self.delay_s, lambda: is_right, seconds, data)

    def clear(self) -> None:
        self.kept.clear()

    def close(self) -> None:
        """Nothing is open."""
