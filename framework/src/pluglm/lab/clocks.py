"""How a replay waits: a virtual clock is moved, a real one is slept on. Knows no request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from pluglm.backends.fake import FakeBackend


class Clock(Protocol):
    """The clock of the engine's backend."""

    def now(self) -> float: ...

    def wait_until(self, time_s: float) -> None:
        """Nothing is live until then."""
        ...

    def stepped_idly(self) -> None:
        """A step computed nothing although requests are live."""
        ...


class VirtualClock:
    """The fake backend's. idle_s: what a step costs that computes nothing, which the backend does not hear of."""

    def __init__(self, backend: FakeBackend, idle_s: float) -> None:
        self._backend, self._idle_s = backend, idle_s

    def now(self) -> float:
        return self._backend.now()

    def wait_until(self, time_s: float) -> None:
        self._backend.advance_to(time_s)

    def stepped_idly(self) -> None:
        self._backend.advance(self._idle_s)


class WallClock:
    """A real backend's: waiting takes as long as it says."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def now(self) -> float:
        return self._now()

    def wait_until(self, time_s: float) -> None:
        while (left := time_s - self._now()) > 0:
            time.sleep(left)

    def stepped_idly(self) -> None:
        """Its time passed by itself."""
