"""Whether what plugins gave is fit for verification: proposals with their rows, draws, and final rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

# k: drafts of one proposal, R: rows, V: vocabulary

TOLERANCE = 1e-5  # of a row's sum
MAX_BRANCHES = 32  # of a proposal


class Proposed(Protocol):
    """What a drafter proposes for one sequence, as the kernel's Proposal. token_ids is a list, of whatever it is."""

    @property
    def token_ids(self) -> Sequence[object]: ...

    @property
    def rows_kV(self) -> object: ...  # noqa: N802 - named for its shape

    @property
    def branches(self) -> object: ...


def problem_of_proposal(proposal: Proposed, most: int, num_ids: int, width: int, device: str) -> str | None:
    """What is wrong with it, or None: ways of 0 to `most` ids, each below num_ids; the rest as in problem_of_rows."""
    ids, branches, rows_kV = proposal.token_ids, proposal.branches, proposal.rows_kV
    if not ids and rows_kV is None and type(branches) is list and not branches:  # the most frequent one, in fewer calls
        return None
    if not isinstance(branches, list) or not all(isinstance(one, list) for one in branches):
        return "proposed branches that are not a list of lists of token ids"
    if branches and rows_kV is not None:
        return "gave rows and branches; branches are for drafts that were chosen, so leave out one of the two"
    if len(branches) > MAX_BRANCHES:
        return f"proposed {len(branches)} branches where {MAX_BRANCHES} are allowed"
    problems = (problem_of_ids(one, most, num_ids) for one in (ids, *branches))
    return next(filter(None, problems), None) or problem_of_rows(rows_kV, ids, width, device)


def problem_of_ids(token_ids: Sequence[object], most: int, num_ids: int) -> str | None:
    """What is wrong with proposed ids, or None: 0 to `most` of them, each below num_ids."""
    if len(token_ids) > most:
        return f"proposed {len(token_ids)} tokens where {most} were allowed"
    wrong = [token for token in token_ids if not _is_id(token, num_ids)]
    return f"proposed token id {wrong[0]!r}, outside 0..{num_ids - 1}" if wrong else None


def _is_id(token: object, num_ids: int) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < num_ids


def problem_of_rows(rows_kV: object, drafts: Sequence[object], width: int, device: str) -> str | None:
    """Why these cannot be the float32 rows on `device` that the drafts were drawn from; or None, as for no rows.

    Whether they are shows in many proposals only: see `pluglm.testing.drafter_rows`.
    """
    if rows_kV is None:
        return None
    if not isinstance(rows_kV, torch.Tensor):
        return f"gave rows that are {type(rows_kV).__name__}, not a tensor"
    if problem := _problem_of_form(rows_kV, (len(drafts), width), torch.device(device)):
        return f"gave rows of {problem}"
    if not drafts:
        return None
    ids_k1 = torch.tensor(drafts, device=rows_kV.device).unsqueeze(1)
    is_law, is_drawn = torch.stack([_are_laws(rows_kV).all(), (rows_kV.gather(1, ids_k1) > 0).all()]).tolist()
    if not is_law:
        return "gave rows that are not probabilities of sum 1"
    return None if is_drawn else "proposed a token to which its own row gives no probability"


def problem_of_draws(
    token_ids: Sequence[int], shape: Sequence[int], num_ids: int, logits_RV: torch.Tensor | None, no_token: int
) -> str | None:
    """What is wrong with one id for each row of logits of that shape, or None.

    num_ids: ids that mean something. logits_RV: as the sampler got them; None when all of those ids were possible.
    no_token: stands for no draw, below all ids.
    """
    num_rows, width = shape
    if len(token_ids) != num_rows:
        return f"returned {len(token_ids)} tokens for {num_rows} rows"
    if min(token_ids) < no_token or max(token_ids) >= width:
        wrong = next(token for token in token_ids if not no_token <= token < width)
        return f"returned token id {wrong}, outside 0..{width - 1}"
    is_possible = max(token_ids) < num_ids
    if logits_RV is not None:
        ids_R = torch.tensor(token_ids, device=logits_RV.device)
        chosen_R1 = logits_RV.gather(1, ids_R.clamp(min=0).unsqueeze(1))[ids_R != no_token]
        is_possible = -torch.inf not in chosen_R1.flatten().tolist()
    return None if is_possible else "drew a token of probability zero"


def problem_of_final_rows(probs_RV: object, logits_RV: torch.Tensor, drawn: Sequence[int | None] = ()) -> str | None:
    """Why these cannot be final rows of such logits, masked ids at -inf; or None. A row may be all zero.

    drawn: what the sampler drew from the first rows, if it did.
    """
    if not isinstance(probs_RV, torch.Tensor):
        return f"gave final rows that are {type(probs_RV).__name__}, not a tensor"
    if problem := _problem_of_form(probs_RV, tuple(logits_RV.shape), logits_RV.device):
        return f"gave final rows of {problem}"
    is_law = (_are_laws(probs_RV) | (probs_RV == 0).all(-1)).all()
    is_masked = ((probs_RV > 0) & (logits_RV == -torch.inf)).any()
    is_fine, gives_masked = torch.stack([is_law, is_masked]).tolist()
    if not is_fine:
        return "gave final rows that are not probabilities of sum 1"
    if gives_masked:
        return "gave a masked token a probability"
    where = [place for place, token in enumerate(drawn) if token is not None]
    chances = probs_RV[where, [drawn[place] for place in where]] if where else probs_RV[:0]
    return None if bool((chances > 0).all()) else "drew a token to which its final row gives no probability"


def _are_laws(rows_RV: torch.Tensor) -> torch.Tensor:
    """Of each row whether no entry is negative or NaN and the sum is 1."""
    error_R = (rows_RV.sum(-1, dtype=torch.float64) - 1.0).abs()
    return (rows_RV >= 0).all(-1) & (error_R <= TOLERANCE)


def _problem_of_form(rows_RV: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> str | None:
    """None for float32 rows of that shape, stored densely on that kind of device."""
    if rows_RV.layout is not torch.strided:
        return f"a tensor of layout {rows_RV.layout}, expected a dense one"
    got = (tuple(rows_RV.shape), rows_RV.dtype, rows_RV.device.type)
    wanted = (shape, torch.float32, device.type)
    return None if got == wanted else "{} {} on {}, expected {} {} on {}".format(*got, *wanted)
