"""top_k and top_p of the same row (`joint`, as in the fused kernels of flashinfer): nothing renormalised between."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import row_sum, wide_column
from pluglm_samplers.ranking import keep_best
from pluglm_samplers.top_p import nucleus_sizes

# R: rows, V: vocabulary


class TopKTopP(LogitsStep):
    """A token survives that both of top_k and top_p keep of the unfiltered row: the shorter prefix of the ranking."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("top_k", "top_p")

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def is_active(self, params: SamplingParams) -> bool:
        return self._most(params) < self._vocab_size or params.top_p < 1.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        most_R = torch.tensor([self._most(row.params) for row in rows], device=logits_RV.device)
        if all(row.params.top_p == 1.0 for row in rows):
            return keep_best(logits_RV, most_R)
        top_p_R1 = wide_column((row.params.top_p for row in rows), logits_RV.device)
        probs_RV = logits_RV.softmax(-1)
        sizes_R = nucleus_sizes(probs_RV, top_p_R1 * row_sum(probs_RV))
        sizes_R = sizes_R.where(top_p_R1.squeeze(1) < 1.0, self._vocab_size)
        return keep_best(logits_RV, torch.minimum(most_R, sizes_R))

    def _most(self, params: SamplingParams) -> int:
        """Tokens that top_k keeps; all when it is off."""
        return min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
