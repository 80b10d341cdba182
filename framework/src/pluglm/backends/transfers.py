"""Copies from host to device that nobody waits for. On other devices than CUDA they are plain copies."""

from __future__ import annotations

import torch


def sent(host: torch.Tensor, device: str) -> torch.Tensor:
    """`host` on the device. The copy is queued on the current stream; `host` may be written to again at once.

    The pinned memory in between is fresh each time: torch gives it out again only when the copy is done.
    """
    if torch.device(device).type != "cuda" or host.is_cuda:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def fill(target: torch.Tensor, host: torch.Tensor) -> None:
    """Overwrites `target` with `host` of the same shape, in the same manner."""
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)
