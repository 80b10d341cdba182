"""The nouns of verification: windows of drafted rows go in, verdicts come out. Knows no rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

# S: sequences, D: drafts of all of them, T: target rows (D + S), V: vocabulary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """S sequences, each with k >= 0 drafts (k may differ) and k + 1 target rows; those of a sequence are consecutive.

    num_drafts: k of each sequence. drafts_D: int64 ids.
    target_TV: float32 probabilities, each row the final one of its position, the drafts before it counted.
    proposal_DV: float32 probabilities that the drafts were really drawn from; None for fixed proposals, or if unknown.
    coins_D, recover_S: float64 in the open interval (0, 1), independent of each other and of the drafts.

    Rows need not be normalised beyond float32: what is stated of a rule holds up to the error of their sums.
    Raises ValueError for shapes and dtypes that do not fit; values are not looked at.
    """

    num_drafts: Sequence[int]
    drafts_D: torch.Tensor
    target_TV: torch.Tensor
    proposal_DV: torch.Tensor | None
    coins_D: torch.Tensor
    recover_S: torch.Tensor
    num_drafts_S: torch.Tensor = field(init=False)
    first_draft_S: torch.Tensor = field(init=False)
    first_row_S: torch.Tensor = field(init=False)  # the target row of each sequence's first position
    owner_D: torch.Tensor = field(init=False)  # the sequence of each draft
    place_D: torch.Tensor = field(init=False)  # its place in the sequence, from 0
    row_D: torch.Tensor = field(init=False)  # the target row that each draft of a chain is judged by

    def __post_init__(self) -> None:
        counts = np.array(self.num_drafts, dtype=np.int64)
        if (counts < 0).any():
            raise ValueError(f"num_drafts has {counts.min()}; a sequence has 0 drafts or more")
        self._require_shapes(len(counts), int(counts.sum()))
        sequences = np.arange(len(counts))
        first, owner = counts.cumsum() - counts, np.repeat(sequences, counts)
        arrays = {
            "num_drafts_S": counts,
            "first_draft_S": first,
            "first_row_S": first + sequences,
            "owner_D": owner,
            "place_D": np.arange(len(owner)) - first[owner],
            "row_D": np.arange(len(owner)) + owner,
        }
        for name, array in arrays.items():
            object.__setattr__(self, name, torch.from_numpy(array).to(self.target_TV.device))

    def _require_shapes(self, num_sequences: int, num_drafts: int) -> None:
        width = self.target_TV.shape[-1]
        wanted = {
            "drafts_D": ((num_drafts,), torch.int64),
            "target_TV": ((num_drafts + num_sequences, width), torch.float32),
            "proposal_DV": ((num_drafts, width), torch.float32),
            "coins_D": ((num_drafts,), torch.float64),
            "recover_S": ((num_sequences,), torch.float64),
        }
        for name, (shape, dtype) in wanted.items():
            tensor: torch.Tensor | None = getattr(self, name)
            if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape} {dtype}")

    def having(self, place: int) -> torch.Tensor:
        """The sequences with a draft at this place, ascending, int64. The host knows them: no device is waited for."""
        ids = np.flatnonzero(np.array(self.num_drafts, dtype=np.int64) > place)
        return torch.from_numpy(ids).to(self.target_TV.device)

    def target_of_drafts(self) -> torch.Tensor:
        """p of each draft of a chain, float64 [D]."""
        return self.target_TV[self.row_D, self.drafts_D].double()

    def proposal_of_drafts(self) -> torch.Tensor:
        """q of each draft, float64 [D]; 1 for fixed proposals."""
        if self.proposal_DV is None:
            return torch.ones_like(self.coins_D)
        return self.proposal_DV.gather(1, self.drafts_D.unsqueeze(1)).squeeze(1).double()

    def count_leading(self, is_kept_D: torch.Tensor) -> torch.Tensor:
        """How many drafts of each sequence come before the first that is not kept, int64 [S]."""
        reach_D = self.place_D.where(~is_kept_D, self.num_drafts_S[self.owner_D])
        return self.num_drafts_S.scatter_reduce(0, self.owner_D, reach_D, "amin")


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """Of each sequence the first num_kept_S drafts are kept, and last_S comes behind them; both int64 [S]."""

    num_kept_S: torch.Tensor
    last_S: torch.Tensor

    def runs(self, windows: Windows) -> list[list[int]]:
        """The ids to commit, 1 to k + 1 for each sequence."""
        drafts, first = windows.drafts_D.tolist(), windows.first_draft_S.tolist()
        ends = zip(first, self.num_kept_S.tolist(), self.last_S.tolist(), strict=True)
        return [[*drafts[start : start + num_kept], last] for start, num_kept, last in ends]
