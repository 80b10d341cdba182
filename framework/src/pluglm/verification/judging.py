"""From a batch of drafted windows to runs of tokens: which a rule judges, the coins of those, where runs are cut.

The coins' keys: ACCEPT and PROPOSE have the window's start as their index beside the position, RECOVER has it as its
position. So no coin that a window looked at behind the end of its run comes again in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from pluglm.verification.block import block
from pluglm.verification.randomness import Purpose, uniform, window_uniforms
from pluglm.verification.token_wise import token
from pluglm.verification.windows import Verdict, Windows

# k: drafts of one window, T: target rows, V: vocabulary

RULES: dict[str, Callable[[Windows], Verdict]] = {"token": token, "block": block}


class Drafted(Protocol):
    """One sequence's drafts in a step. It has one row of the target more than drafts, consecutive among all rows."""

    @property
    def drafts(self) -> Sequence[int]: ...

    @property
    def proposal_rows(self) -> torch.Tensor | None:
        """float32 [k, V] or more rows, what the drafts were drawn from; None leaves them to be compared."""
        ...

    @property
    def key(self) -> tuple[int, int, int]:
        """seed, lane, and the position of the first draft."""
        ...


class Run(NamedTuple):
    """What is committed of one window: first_row is its first of all rows, num_accepted of the tokens were drafts.

    It ends with a token that was drawn. If it does not, all of it are drafts, and the row behind them has no token.
    """

    first_row: int
    token_ids: list[int]
    num_accepted: int


def judged_rows(rule: str, windows: Sequence[Drafted]) -> set[int]:
    """The rows of windows that need the target's final rows instead of draws from them."""
    return set() if rule == "reproducible" else {row for _, span in _judged(windows) for row in span}


def verify(
    rule: str, windows: Sequence[Drafted], drawn: Mapping[int, int], final: Mapping[int, torch.Tensor]
) -> list[Run]:
    """A run for each window: by `rule` where drafts come with their rows, else by comparing them with draws.

    drawn: ids by row. final: float32 rows_V by row, of those in judged_rows. A row without a token is in neither, or
    its final row is all zero.
    """
    judged = {} if rule == "reproducible" else _judge(rule, _judged(windows), final)
    runs, row = list[Run](), 0
    for one in windows:
        runs.append(judged.get(row) or _compare(one.drafts, row, drawn))
        row += len(one.drafts) + 1
    return runs


def _judged(windows: Sequence[Drafted]) -> list[tuple[Drafted, range]]:
    """Those with rows to judge their drafts by, each with the numbers of its target rows."""
    found, row = list[tuple[Drafted, range]](), 0
    for one in windows:
        stop = row + len(one.drafts) + 1
        if one.drafts and one.proposal_rows is not None:
            found.append((one, range(row, stop)))
        row = stop
    return found


def _compare(drafts: Sequence[int], first_row: int, drawn: Mapping[int, int]) -> Run:
    """`reproducible` for one window: draws, up to and with the first that is not the draft."""
    if not drafts:  # as most windows are
        return Run(first_row, [drawn[first_row]] if first_row in drawn else [], 0)
    run = list[int]()
    for place in range(len(drafts) + 1):
        found = drawn.get(first_row + place)
        if found is None:
            break
        run.append(found)
        if place == len(drafts) or found != drafts[place]:
            return Run(first_row, run, place)
    return Run(first_row, run, len(run))


def _judge(rule: str, pairs: Sequence[tuple[Drafted, range]], final: Mapping[int, torch.Tensor]) -> dict[int, Run]:
    """By first row."""
    if not pairs or not final:  # without final rows the sampler failed, which ended those requests
        return {}
    none_V = torch.zeros_like(next(iter(final.values())))
    target_TV = torch.stack([final.get(row, none_V) for _, span in pairs for row in span])
    is_empty_T = (target_TV == 0).all(-1)
    # What stands in place of such a row is of no matter for the law of the tokens before it.
    target_TV = target_TV.masked_fill_(is_empty_T.unsqueeze(1), 1.0 / target_TV.shape[1])
    windows = _windows([one for one, _ in pairs], target_TV)
    runs, is_empty = RULES[rule](windows).runs(windows), iter(is_empty_T.tolist())
    return {
        span.start: _cut(span.start, run, [next(is_empty) for _ in span])
        for (_, span), run in zip(pairs, runs, strict=True)
    }


def _cut(first_row: int, run: list[int], is_empty: list[bool]) -> Run:
    """Up to the first row that has no token."""
    num_usable = [*is_empty, True].index(True)
    return Run(first_row, run[:num_usable], min(len(run) - 1, num_usable))


def _windows(drafted: Sequence[Drafted], target_TV: torch.Tensor) -> Windows:
    device, counts = target_TV.device, [len(one.drafts) for one in drafted]
    coins = [coin for one in drafted for coin in window_uniforms(*one.key, len(one.drafts), Purpose.ACCEPT)]
    recover = [uniform(*one.key, Purpose.RECOVER) for one in drafted]
    rows = [one.proposal_rows[: len(one.drafts)] for one in drafted if one.proposal_rows is not None]
    return Windows(
        num_drafts=counts,
        drafts_D=torch.tensor([draft for one in drafted for draft in one.drafts], device=device),
        target_TV=target_TV,
        proposal_DV=torch.cat(rows),
        coins_D=torch.tensor(coins, dtype=torch.float64, device=device),
        recover_S=torch.tensor(recover, dtype=torch.float64, device=device),
    )
