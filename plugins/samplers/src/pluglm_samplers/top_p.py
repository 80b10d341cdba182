"""Nucleus truncation (Holtzman et al., "The curious case of neural text degeneration", 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import SHORT, Floats, Ids, Wide, in_blocks, keep_only, masses, on_host, running_sums
from pluglm_samplers.mass_prefix import floors, mass_prefix
from pluglm_samplers.ranking import descending, keep_best, keep_prefix, sort_best

# R: rows, V: vocabulary, B: rows of a block, C: columns of a block


class TopP(LogitsStep):
    """The smallest prefix of the ranking whose mass is p or more survives (ties by lowest id); p = 0 keeps one token.

    Mass is measured on what earlier steps kept. A token's is exp(l - max l) in float32, their running sum float64.
    """

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = True
    parameters = ("top_p",)
    limits = ("top_p",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.top_p < 1.0

    def most_kept(self, params: SamplingParams) -> None:
        """See OrderStep: there is no bound."""

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        return keep_nuclei(logits_RV, [row.params.top_p for row in rows], None)


def keep_nuclei(logits_RV: torch.Tensor, top_p: Sequence[float], most: Sequence[int] | None) -> torch.Tensor:
    """All but the nucleus of each row go to -inf, in place, and of it all but the `most` best tokens if given.

    A row whose best logit is not finite stays, for whoever draws.
    """
    size = logits_RV.shape[1]
    if on_host(logits_RV):
        columns_R1 = [np.array(top_p)[:, None]] if most is None else [np.array(top_p)[:, None], np.array(most)]
        return in_blocks(_keep_nuclei_of_block, logits_RV, *columns_R1)
    sizes_R = nucleus_sizes(sort_best(logits_RV, size), top_p)
    return keep_best(logits_RV, sizes_R if most is None else sizes_R.minimum(sizes_R.new_tensor(most)))


def nucleus_sizes(ranked_RV: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    """Tokens in the smallest prefix of the ranking with top_p of the row's mass, int64 [R], at least 1; V for p = 1.

    ranked_RV: all logits of a row, the largest first. Of a row without mass it is 1.
    """
    p_R = torch.tensor(top_p, dtype=torch.float64, device=ranked_RV.device)
    running_RV = (ranked_RV - ranked_RV[:, :1]).exp_().cumsum(-1, dtype=torch.float64)
    sizes_R = (running_RV[:, :-1] < (running_RV[:, -1] * p_R).unsqueeze(1)).sum(-1) + 1
    return sizes_R.where(p_R < 1, ranked_RV.shape[1])


def _keep_nuclei_of_block(logits_BC: Floats, p_B1: Wide, most_B: Ids | None = None) -> None:
    num_kept = logits_BC.shape[1]
    if num_kept > SHORT and p_B1[0, 0] < 1:
        below_1V, mass_1V, total_11 = masses(logits_BC)
        if np.isnan(total_11[0, 0]):
            return
        ids_n = _nucleus(logits_BC[0], below_1V[0], mass_1V[0], float(total_11[0, 0]), float(p_B1[0, 0]))
        if ids_n is None:
            _keep_ranked(logits_BC, p_B1, most_B)
            return
        keep_only(logits_BC[0], ids_n)
        num_kept = len(ids_n)
    elif num_kept <= SHORT:
        _keep_ranked(logits_BC, p_B1, most_B)
        return
    if most_B is not None and most_B[0] < num_kept:
        keep_best(torch.from_numpy(logits_BC), torch.from_numpy(most_B))


def _nucleus(logits_V: Floats, below_V: Floats, mass_V: Floats, total: float, p: float) -> Ids | None:
    """Ids as `mass_prefix` gives them. Tokens rank by their logits, since l - max l may round some to the same."""
    best = float(logits_V.max())
    ceilings = (-(best + floor) for floor in floors(below_V, (1 - p) * total))
    return mass_prefix(np.float32(0.0) - logits_V, mass_V, p * total, ceilings)


def _keep_ranked(logits_BC: Floats, p_B1: Wide, most_B: Ids | None) -> None:
    ranked_BC = descending(logits_BC)
    running_BC = running_sums(np.exp(ranked_BC - ranked_BC[:, :1]))
    sizes_B = (running_BC >= p_B1 * running_BC[:, -1:]).argmax(-1) + 1
    if most_B is not None:
        sizes_B = np.minimum(np.where(p_B1[:, 0] < 1, sizes_B, ranked_BC.shape[1]), most_B)
    keep_prefix(logits_BC, ranked_BC, sizes_B)
