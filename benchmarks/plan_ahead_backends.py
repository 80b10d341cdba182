"""Backends that compute while the host goes on: a device that takes a fixed time, and the CPU on its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from pydantic import Field

from pluglm.backends.cpu import CpuBackend, CpuConfig
from pluglm.backends.fake import FakeBackend, FakeConfig
from pluglm.kernel.interfaces.backend import BackendContext


class DeviceConfig(FakeConfig):
    """device_s: seconds of wall time from a launch to its result."""

    device_s: float = Field(default=0.002, ge=0)


class DeviceBackend(FakeBackend):
    """The fake backend, whose tokens come no sooner than the device has had its time. host_s: what the fake took."""

    Config = DeviceConfig

    def __init__(self, config: DeviceConfig, context: BackendContext) -> None:
        super().__init__(config, context)
        self._device_s = config.device_s
        self.host_s: list[float] = []

    def launch(self, *arguments: Any) -> Callable[[], torch.Tensor]:
        began_s = time.perf_counter()
        logits_RV = super().execute(*arguments)
        launched_s = time.perf_counter()
        self.host_s.append(launched_s - began_s)

        def wait() -> torch.Tensor:
            while time.perf_counter() < launched_s + self._device_s:
                pass
            return logits_RV

        return wait

    def execute(self, *arguments: Any) -> torch.Tensor:
        return self.launch(*arguments)()


class ThreadBackend(CpuBackend):
    """The CPU backend, with the model on a thread of its own."""

    Config = CpuConfig

    def __init__(self, config: CpuConfig, context: BackendContext) -> None:
        super().__init__(config, context)
        self._todo: SimpleQueue[tuple[tuple[Any, ...], list[torch.Tensor], threading.Lock]] = SimpleQueue()
        threading.Thread(target=self._compute, daemon=True).start()

    def launch(self, *arguments: Any) -> Callable[[], torch.Tensor]:
        found: list[torch.Tensor] = []
        done = threading.Lock()
        done.acquire()
        self._todo.put((arguments, found, done))

        def wait() -> torch.Tensor:
            done.acquire()
            return found[0]

        return wait

    def execute(self, *arguments: Any) -> torch.Tensor:
        return self.launch(*arguments)()

    def _compute(self) -> None:
        while True:
            arguments, found, done = self._todo.get()
            found.append(super().execute(*arguments))
            done.release()
