"""Allows some tokens and no others: the hard mask of `allowed_token_ids`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import PerParams, id_tensor, places

# R: rows, V: vocabulary, n: allowed tokens of all rows


class AllowedTokens(LogitsStep):
    """Every token that is not allowed goes to -inf; a row of which no allowed token is alive is left empty."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    hard_mask = True
    parameters = ("allowed_token_ids",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        self._ids = PerParams(lambda params: id_tensor(params.allowed_token_ids or ()))

    def is_active(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        index = places([self._ids(row.params) for row in rows], logits_RV)
        return torch.full_like(logits_RV, -torch.inf).index_put_(index, logits_RV[index])
