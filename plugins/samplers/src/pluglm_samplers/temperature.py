"""Divides logits by the temperature. Greedy rows never come here: their argmax is the sampler's business."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import SHORT, Floats, on_host
from pluglm_samplers.columns import FLOAT32

# R: rows, V: vocabulary

_LARGEST: float = FLOAT32.max


class Temperature(LogitsStep):
    """(l - max l) / T in float32. The maximum goes first, so the smallest temperature cannot overflow to +inf."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("temperature",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.temperature != 1.0

    def most_kept(self, params: SamplingParams) -> None:
        """See OrderStep: there is no bound."""

    def keeps_order(self, params: SamplingParams) -> bool:
        """See MonotonicStep."""
        return True

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        temperature_R1 = np.array([[min(row.params.temperature, _LARGEST)] for row in rows], dtype=np.float32)
        if on_host(logits_RV):  # numpy has the same arithmetic, takes less to call and starts no threads
            host_RV = logits_RV.numpy()
            with np.errstate(all="ignore"):
                if host_RV.shape[1] <= SHORT:
                    _divide(host_RV, temperature_R1)
                else:  # a row stays in the core's cache, so memory is read once and not three times
                    for logits_V, temperature_1 in zip(host_RV, temperature_R1, strict=True):
                        _divide(logits_V, temperature_1)
            return logits_RV
        device_R1 = torch.from_numpy(temperature_R1).to(logits_RV.device)
        return logits_RV.sub_(logits_RV.amax(-1, keepdim=True)).div_(device_R1)


def _divide(logits_RV: Floats, temperature_R1: Floats) -> None:
    """In place; for one row without its dimension, too."""
    logits_RV -= logits_RV.max(-1, keepdims=True)
    logits_RV /= temperature_R1
