"""top_k and top_p of the same row (`joint`, as in the fused kernels of flashinfer): nothing renormalised between."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.ranking import keep_best
from pluglm_samplers.top_p import keep_nuclei

# R: rows, V: vocabulary


class TopKTopP(LogitsStep):
    """A token survives that both of top_k and top_p keep of the unfiltered row: the shorter prefix of the ranking."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("top_k", "top_p")
    limits = ("top_k", "top_p")

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def is_active(self, params: SamplingParams) -> bool:
        return self._most(params) < self._vocab_size or params.top_p < 1.0

    def most_kept(self, params: SamplingParams) -> int | None:
        """See OrderStep. With a top_p the mass of the whole row counts, so that there is no bound to rely on."""
        return self._most(params) if params.top_p == 1.0 else None

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        most = [self._most(row.params) for row in rows]
        if all(row.params.top_p == 1.0 for row in rows):
            return keep_best(logits_RV, torch.tensor(most, device=logits_RV.device))
        return keep_nuclei(logits_RV, [row.params.top_p for row in rows], most)

    def _most(self, params: SamplingParams) -> int:
        """Tokens that top_k keeps; all when it is off."""
        return min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
