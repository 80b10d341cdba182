"""Fixed siblings: a tree of proposals that were chosen, not drawn (the rule for fixed candidates in Miao et al.,
"SpecInfer: accelerating large language model serving with tree-based speculative inference", ASPLOS 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pluglm.verification.drawing import inverse_cdf
from pluglm.verification.windows import Windows

# S: sequences, D: drafts (nodes) of all of them, A: sequences that have a node, V: vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class TreeVerdict:
    """row_S: the place of the row that last_S was drawn from, 0 or one more than the node kept last; int64 [S] both."""

    row_S: torch.Tensor
    last_S: torch.Tensor

    def runs(self, windows: Windows, parents: Sequence[int]) -> list[list[int]]:
        """The ids to commit, for each sequence those from a child of the root down and one more."""
        drafts, found = windows.drafts_D.tolist(), []
        for start, row, last in zip(
            windows.first_draft_S.tolist(), self.row_S.tolist(), self.last_S.tolist(), strict=True
        ):
            run, place = [last], row
            while place:
                run.append(drafts[start + place - 1])
                place = parents[start + place - 1]
            found.append(run[::-1])
        return found


def siblings(windows: Windows, parents: Sequence[int]) -> TreeVerdict:
    """Tries the children of a row in order, each with p(x) / (p without the refused ones); goes on below a kept one.

    When all are refused, a draw from p without them ends the run. parents: for each draft 0 for a child of the root,
    j + 1 for a child of node j of its own sequence, which comes before it. Row 0 of a sequence follows the committed
    text, row j + 1 follows node j. A token twice among siblings is refused the second time. recover_S draws the last.
    Raises ValueError for drawn proposals, or parents that do not fit.
    """
    if windows.proposal_DV is not None:
        raise ValueError("siblings verifies fixed proposals; pass proposal_DV=None")
    _require_tree(windows, parents)
    parent_D = torch.tensor(list(parents), dtype=torch.int64, device=windows.drafts_D.device)
    row_S = _descend(windows, parent_D)
    last_SV = windows.target_TV.index_select(0, windows.first_row_S + row_S).double()
    is_refused_D = parent_D == row_S[windows.owner_D]
    width = last_SV.shape[1]
    most_D = torch.zeros_like(windows.coins_D).where(is_refused_D, torch.inf)
    rest_SV = last_SV.view(-1).scatter_reduce(0, windows.owner_D * width + windows.drafts_D, most_D, "amin")
    rest_SV = rest_SV.view_as(last_SV)
    is_usable_S1 = rest_SV.amax(-1, keepdim=True) > 0
    return TreeVerdict(row_S, inverse_cdf(rest_SV.where(is_usable_S1, last_SV), windows.recover_S))


def _require_tree(windows: Windows, parents: Sequence[int]) -> None:
    if len(parents) != len(windows.drafts_D):
        raise ValueError(f"parents has {len(parents)} entries for {len(windows.drafts_D)} drafts")
    counts, given = np.array(windows.num_drafts, dtype=np.int64), np.array(parents, dtype=np.int64)
    places = np.arange(len(given)) - (counts.cumsum() - counts).repeat(counts)
    wrong = np.flatnonzero((given < 0) | (given > places))
    if len(wrong):
        node = places[wrong[0]]
        raise ValueError(
            f"node {node} has parent {given[wrong[0]]}; it must be 0..{node}, the root or a node before it"
        )


def _descend(windows: Windows, parent_D: torch.Tensor) -> torch.Tensor:
    """Where each sequence's walk ends, int64 [S]. Parents come before children, so one pass over the nodes does."""
    at_S, left_S = torch.zeros_like(windows.first_draft_S), torch.ones_like(windows.recover_S)
    row_D = windows.first_row_S[windows.owner_D] + parent_D
    p_D = windows.target_TV[row_D, windows.drafts_D].double()
    p_D = p_D.where(_is_first(row_D * windows.target_TV.shape[1] + windows.drafts_D), 0.0)
    for place in range(max(windows.num_drafts, default=0)):
        ids_A = windows.having(place)
        node_A = windows.first_draft_S[ids_A] + place
        at_A, left_A = at_S[ids_A], left_S[ids_A]
        is_tried_A = parent_D[node_A] == at_A
        is_kept_A = is_tried_A & (windows.coins_D[node_A] * left_A < p_D[node_A])
        at_S[ids_A] = at_A.where(~is_kept_A, place + 1)
        left_S[ids_A] = (left_A - p_D[node_A]).where(is_tried_A, left_A).where(~is_kept_A, 1.0)
    return at_S


def _is_first(keys_D: torch.Tensor) -> torch.Tensor:
    """Whether no entry before it is equal."""
    sorted_D, order_D = keys_D.sort(stable=True)
    is_new_D = torch.ones_like(keys_D, dtype=torch.bool)
    is_new_D[1:] = sorted_D[1:] != sorted_D[:-1]
    return torch.empty_like(is_new_D).scatter_(0, order_D, is_new_D)
