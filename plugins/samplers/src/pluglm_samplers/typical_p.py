"""Locally typical sampling (Meister et al., "Locally typical sampling", TACL 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import (
    SHORT,
    Floats,
    Wide,
    drop_where,
    in_blocks,
    keep_only,
    masses,
    mean_below,
    on_host,
    running_sums,
)
from pluglm_samplers.columns import entropy, row_sum, wide_column
from pluglm_samplers.mass_prefix import floors, mass_prefix

# R: rows, V: vocabulary, B: rows of a block, C: columns of a block


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

    def most_kept(self, params: SamplingParams) -> None:
        """See OrderStep: there is no bound."""

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        if on_host(logits_RV):
            p_R1 = np.array([[row.params.typical_p] for row in rows])
            return in_blocks(_keep_typical, logits_RV, p_R1)
        typical_p_R1 = wide_column((row.params.typical_p for row in rows), logits_RV.device)
        logprobs_RV = logits_RV.log_softmax(-1)
        oddness_RV = (logprobs_RV + entropy(logits_RV).float()).abs_()  # infinite for masked tokens
        order_RV = oddness_RV.sort(dim=-1, stable=True).indices
        probs_RV = logprobs_RV.exp_()
        total_R1 = row_sum(probs_RV)
        running_RV = probs_RV.gather(1, order_RV).cumsum(-1, dtype=torch.float64)
        num_kept_R1 = (running_RV < typical_p_R1 * total_R1).sum(-1, keepdim=True) + 1
        is_first_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) < num_kept_R1
        is_kept_RV = torch.zeros_like(is_first_RV).scatter_(1, order_RV, is_first_RV)
        # NaN has no order: such a row is left to whoever draws
        return logits_RV.masked_fill_(~(is_kept_RV | total_R1.isnan()), -torch.inf)


def _keep_typical(logits_BC: Floats, p_B1: Wide) -> None:
    """|-ln p - H| is |(l - max l) - its mean|: what a logarithm of the total would add cancels out."""
    below_BC, mass_BC, total_B1 = masses(logits_BC)
    mean_B1 = mean_below(below_BC, mass_BC, total_B1).astype(np.float32)
    odd_BC = np.abs(below_BC - mean_B1)
    wanted_B1 = p_B1 * total_B1
    if logits_BC.shape[1] > SHORT:
        if np.isnan(total_B1[0, 0]):
            return
        mean, spare = float(mean_B1[0, 0]), float((total_B1 - wanted_B1)[0, 0])
        # every token above a floor is at most so odd
        ceilings = (max(abs(floor - mean), abs(mean)) for floor in floors(below_BC[0], spare))
        ids_n = mass_prefix(odd_BC[0], mass_BC[0], float(wanted_B1[0, 0]), ceilings)
        if ids_n is not None:
            keep_only(logits_BC[0], ids_n)
            return
    _drop_odd(logits_BC, odd_BC, mass_BC, wanted_B1)


def _drop_odd(logits_BC: Floats, odd_BC: Floats, mass_BC: Floats, wanted_B1: Wide) -> None:
    """Sorts (oddness, id) as one integer, with vector instructions. NaN has no order: such a row is left."""
    keys_BC = odd_BC.view(np.int32).astype(np.int64) << 32  # floats that are not negative order as their bits
    keys_BC |= np.arange(odd_BC.shape[1])
    sorted_BC = np.sort(keys_BC, axis=-1)
    rows_B1 = np.arange(len(odd_BC))[:, None]
    running_BC = running_sums(mass_BC[rows_B1, sorted_BC & 0xFFFFFFFF])
    last_B1 = (running_BC[:, :-1] < wanted_B1).sum(-1, keepdims=True)
    drop_where(logits_BC, (keys_BC > sorted_BC[rows_B1, last_B1]) & ~np.isnan(wanted_B1))
