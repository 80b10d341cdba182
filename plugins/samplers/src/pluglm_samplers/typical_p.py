"""Locally typical sampling (Meister et al., "Locally typical sampling", TACL 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import entropy, row_sum, wide_column

# R: rows, V: vocabulary


class TypicalP(LogitsStep):
    """Ranks tokens by |-ln p - H|, ties by lowest id; the smallest prefix whose mass is typical_p or more survives.

    The most likely token may go: that is the method. Greedy rows ignore it.
    """

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    parameters = ("typical_p",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.typical_p < 1.0 and not params.greedy

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        typical_p_R1 = wide_column((row.params.typical_p for row in rows), logits_RV.device)
        logprobs_RV = logits_RV.log_softmax(-1)
        oddness_RV = (logprobs_RV + entropy(logits_RV).float()).abs_()  # infinite for masked tokens
        order_RV = ascending(oddness_RV)
        probs_RV = logprobs_RV.exp_()
        total_R1 = row_sum(probs_RV)
        running_RV = probs_RV.gather(1, order_RV).cumsum(-1, dtype=torch.float64)
        num_kept_R1 = (running_RV < typical_p_R1 * total_R1).sum(-1, keepdim=True) + 1
        is_first_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) < num_kept_R1
        is_kept_RV = torch.zeros_like(is_first_RV).scatter_(1, order_RV, is_first_RV)
        # NaN has no order: such a row is left to whoever draws
        return logits_RV.masked_fill_(~(is_kept_RV | total_R1.isnan()), -torch.inf)


def ascending(values_RV: torch.Tensor) -> torch.Tensor:
    """ids_RV int64 of the values (float32, none negative) from the least on, ties by lowest id, NaN last.

    On the host numpy sorts (value, id) as one number, with vector instructions, in a sixth of torch's time.
    """
    if values_RV.device.type != "cpu":
        return values_RV.sort(dim=-1, stable=True).indices
    keys_RV = values_RV.numpy().view(np.int32).astype(np.int64) << 32  # such floats order as the integers of their bits
    keys_RV |= np.arange(values_RV.shape[1])
    keys_RV.sort(axis=-1)
    return torch.from_numpy(keys_RV & 0xFFFFFFFF)
