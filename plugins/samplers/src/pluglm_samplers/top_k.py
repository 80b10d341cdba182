"""Keeps exactly the k most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.ranking import keep_best

# R: rows, V: vocabulary


class TopK(LogitsStep):
    """min(k, live tokens) survive, ties by lowest id. 0 and -1 are off; a k of the vocabulary or more keeps all."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("top_k",)
    limits = ("top_k",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def is_active(self, params: SamplingParams) -> bool:
        return 0 < params.top_k < self._vocab_size

    def most_kept(self, params: SamplingParams) -> int:
        """See OrderStep."""
        return params.top_k

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        counts_R = torch.tensor([row.params.top_k for row in rows], device=logits_RV.device)
        return keep_best(logits_RV, counts_R)
