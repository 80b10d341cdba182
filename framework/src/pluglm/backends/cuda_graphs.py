"""Capture on a CUDA device. The only file that knows torch's CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pluglm.backends.graphs import Captured

_WARM_UPS = 2  # runs before a capture: kernels are compiled and tuned, libraries make their workspaces


class CudaGraphTools:
    """All graphs of the device share one memory pool: they never run at the same time, and outputs are copied."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._pool: Any = None

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads of the process may go on using CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function()
        return Captured(graph.replay, output)
