"""From logits to the next draft of each sequence: the most likely token, or a draw whose row is kept with it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self

import torch

from pluglm.kernel.interfaces.component import Capabilities
from pluglm.kernel.interfaces.drafter import ROWS, DraftRequest, Proposal
from pluglm.verification.drawing import inverse_cdf
from pluglm_spec_decode.adaptive import AdaptiveConfig, AdaptiveDrafter

# R: rows with logits, k: drafts of a sequence, V: the target's logits

logger = logging.getLogger("pluglm")


class DrawsConfig(AdaptiveConfig):
    """draws: drafts for sampled requests are drawn at their temperature, as verification by token and block needs."""

    draws: bool = False


class DrawingDrafter(AdaptiveDrafter):
    """Provides ROWS when it draws."""

    may_rest = True

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        of_length = super().capabilities(config)
        return replace(of_length, provides=of_length.provides | ({ROWS} if config.draws else frozenset()))


@dataclass(slots=True)
class Drafted:
    """One sequence in one proposal. drafts grows to num_wanted, its rows with it if they are drawn.

    coins: one for each draft that is drawn from a row, none when the most likely token is taken.
    """

    sequence_id: int
    token_ids: list[int]
    num_wanted: int
    coins: Sequence[float] = ()
    temperature: float = 0.0
    drafts: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, request: DraftRequest, num_wanted: int, draws: bool) -> Self:
        """draws: drafts are drawn at the request's temperature, if it is sampled at all."""
        one = cls(request.sequence_id, list(request.token_ids), num_wanted)
        if draws and not request.request.params.greedy:
            one.coins, one.temperature = request.coins(num_wanted), request.request.params.temperature
        return one


def pick(drafted: Mapping[int, Drafted], logits_RV: torch.Tensor, width: int) -> None:
    """Adds the next draft of each, by row of logits_RV (float32, of ids that mean something).

    width: V of the rows that are kept; what logits_RV lacks of it is impossible. Where the best logit is NaN or
    infinite the drafts end: num_wanted is what there is, and the log says so once.
    """
    highest, best = (one.tolist() for one in logits_RV.max(dim=-1))
    drawn = dict[int, Drafted]()
    for row, one in drafted.items():
        if not math.isfinite(highest[row]):
            _say_once()
            one.num_wanted = len(one.drafts)
        elif one.coins:
            drawn[row] = one
        else:
            one.drafts.append(best[row])
    if not drawn:
        return
    some_RV, device = logits_RV[list(drawn)], logits_RV.device
    temperature_R1 = torch.tensor([[one.temperature] for one in drawn.values()], device=device)
    # The largest goes first: divided by a tiny temperature it would overflow.
    probs_RV = ((some_RV - some_RV.amax(-1, keepdim=True)) / temperature_R1).softmax(-1)
    probs_RV = torch.nn.functional.pad(probs_RV, (0, width - probs_RV.shape[1]))
    coins = [one.coins[len(one.drafts)] for one in drawn.values()]
    ids = inverse_cdf(probs_RV, torch.tensor(coins, dtype=torch.float64, device=device)).tolist()
    for one, row_V, token_id in zip(drawn.values(), probs_RV, ids, strict=True):
        one.drafts.append(token_id)
        one.rows.append(row_V)


@cache
def _say_once() -> None:
    logger.warning("a drafter's logits are NaN or infinite, so its drafts end there; check its weights and the dtype")


class LastProposals:
    """What was proposed for each sequence since its last commit: drawn again, near ties could fall otherwise."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, list[int], torch.Tensor | None]] = {}

    def keep(self, one: Drafted) -> None:
        """Nothing when it has no drafts."""
        if one.drafts:
            rows_kV = torch.stack(one.rows) if one.rows else None
            self._made[one.sequence_id] = (len(one.token_ids), one.drafts, rows_kV)

    def proposal(self, request: DraftRequest, num_wanted: int) -> Proposal:
        """At most num_wanted of the drafts, none when the text has changed since."""
        num_known, drafts, rows_kV = self._made.get(request.sequence_id, (-1, [], None))
        if num_known != len(request.token_ids) or num_wanted < 1:
            return Proposal([])
        return Proposal(drafts[:num_wanted], None if rows_kV is None else rows_kV[:num_wanted])

    def pop(self, sequence_id: int) -> int | None:
        """Forget it; the length of the text that it was for, None when there was none."""
        made = self._made.pop(sequence_id, None)
        return None if made is None else made[0]
