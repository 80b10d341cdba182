"""From logits to committed tokens: hard masks, the sampler, and the verification of drafts by `pluglm.verification`.

By default every position is drawn from the target's own row while the draw equals the draft, so the output is what
plain sampling with the same seed gives, whatever a drafter proposes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from pluglm.kernel.core import SampleRow, Sequence, Status, TokenLogprobs, new_row
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.guard import Guarded
from pluglm.kernel.interfaces.grammar import Matcher
from pluglm.kernel.interfaces.sampler import NO_TOKEN, FinalRows
from pluglm.kernel.parts import Parts
from pluglm.verification.checking import problem_of_draws, problem_of_final_rows
from pluglm.verification.judging import Run, judged_rows, verify

# R: rows of the batch, V: logits per row, W: 32-bit words of a grammar mask
NEG_INF = float("-inf")
NOTHING_LEFT = "no token is left to draw; token id masks, min_tokens and grammar must leave one, steps give no NaN"


@dataclass(slots=True)
class Drawn:
    """What one sequence's rows gave: the tokens to commit (at least one), or why the request fails."""

    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None


class Window(NamedTuple):
    """One sequence's consecutive rows: the drafts between them were computed in this step."""

    sequence: Sequence
    drafts: tuple[int, ...]

    def sample_rows(self) -> list[SampleRow]:
        """One row per draft and one more; row i has seen the drafts before i."""
        sequence, drafts = self
        request, output = sequence.request, sequence.output_token_ids
        return [
            new_row(
                params=request.params,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=[*output, *drafts[:index]] if index else output,
                seed=request.seed,
                lane=sequence.lane,
                position=len(output) + index,
                memory=sequence.sampler_memory,
            )
            for index in range(len(drafts) + 1)
        ]

    @property
    def proposal_rows(self) -> torch.Tensor | None:
        """Not of a greedy request: its draw is certain, so comparing drafts with it keeps as many of them."""
        proposal, is_greedy = self.sequence.proposal, self.sequence.request.params.greedy
        return None if is_greedy or proposal is None else proposal.rows_kV

    @property
    def key(self) -> tuple[int, int, int]:
        return self.sequence.request.seed, self.sequence.lane, self.sequence.num_output


class Drawer:
    """Applies masks, calls the sampler, checks what it gave, has drafts verified; plugins run by `attempting`."""

    def __init__(self, parts: Parts, attempting: Callable[..., Any]) -> None:
        self._parts = parts
        self._attempting = attempting
        self._vocab_size = parts.tokenizer.vocab_size  # the head may have padding rows beyond

    def draw(self, logits_RV: torch.Tensor, windows: list[Window]) -> Guarded[list[Drawn]]:
        """One result per window, without tokens where a plugin failed and `attempting` ended the request.

        A broken row fails its own request, and only when verification gets to it. logits_RV is changed in place.
        """
        rows = [row for window in windows for row in window.sample_rows()]
        owners = [window.sequence for window in windows for _ in (*window.drafts, 0)]
        shown_RV = logits_RV.clone() if any(row.params.logprobs is not None for row in rows) else logits_RV
        if logits_RV.shape[1] > self._vocab_size:
            with torch.inference_mode():
                logits_RV[:, self._vocab_size :] = NEG_INF
        broken, is_all_possible = self._inspect(logits_RV, f"{self._parts.names['step']} gave NaN or infinite logits")
        if any(window.sequence.matcher is not None for window in windows):
            yield from self._mask(logits_RV, windows)
            masked, is_all_possible = self._inspect(logits_RV, "the grammar allows no token here")
            broken = masked | broken
        usable = [row for row, owner in enumerate(owners) if row not in broken and owner.status is Status.RUNNING]
        judged = judged_rows(self._parts.verification, windows)
        sample = partial(self._sample, logits_RV, {row: rows[row] for row in usable}, judged, is_all_possible)
        found = yield from self._attempting("sampler", map(owners.__getitem__, usable), sample)
        drawn, final = found or ({}, {})
        for row in [row for row in final if rows[row].params.logprobs_mode == "processed"]:
            shown_RV[row] = final[row].log()
        runs = verify(self._parts.verification, windows, drawn, final)
        return [self._result(window, run, broken, shown_RV) for window, run in zip(windows, runs, strict=True)]

    def _inspect(self, logits_RV: torch.Tensor, reason: str) -> tuple[dict[int, str], bool]:
        """Rows that nothing can be drawn from, and whether the others give every known id a positive probability.

        On the host by numpy, which starts no threads, and row by row only if there is something to find: no infinity
        and no NaN is lost in a sum, which takes one pass.
        """
        if logits_RV.device.type == "cpu":
            host_RV = (logits_RV.detach() if logits_RV.requires_grad else logits_RV).numpy()[:, : self._vocab_size]
            if abs(np.einsum("rv->", host_RV)) < -NEG_INF:  # false for NaN
                return {}, True
            lowest_R, best_R = host_RV.min(-1), host_RV.max(-1)
        else:
            known_RV = logits_RV.detach()[:, : self._vocab_size]
            lowest_R, best_R = torch.stack(torch.aminmax(known_RV, dim=-1)).cpu().numpy()
        return dict.fromkeys(np.flatnonzero(~np.isfinite(best_R)).tolist(), reason), NEG_INF not in lowest_R

    def _mask(self, logits_RV: torch.Tensor, windows: list[Window]) -> Guarded[None]:
        rows = torch.split(logits_RV, [len(window.drafts) + 1 for window in windows])
        for window, part_RV in zip(windows, rows, strict=True):
            if (matcher := window.sequence.matcher) is not None:
                mask = partial(_mask_window, part_RV, window.drafts, matcher)
                yield from self._attempting("grammar", [window.sequence], mask)

    @torch.inference_mode()
    def _sample(
        self, logits_RV: torch.Tensor, rows: dict[int, SampleRow], judged: set[int], is_all_possible: bool
    ) -> tuple[dict[int, int], dict[int, torch.Tensor]]:
        """By row: the sampler's ids, and the probabilities that it draws from where these are asked for.

        ComponentFailure for what cannot be either.
        """
        shaped = [row for row, one in rows.items() if row in judged or one.params.logprobs_mode == "processed"]
        plain = [row for row in rows if row not in judged]
        drawn, final, problem = dict[int, int](), dict[int, torch.Tensor](), None
        if plain:
            some_RV = logits_RV if len(plain) == logits_RV.shape[0] and not shaped else logits_RV[plain]
            before_RV = None if is_all_possible else some_RV.clone()  # the sampler may change what it gets
            tokens = list(map(operator.index, self._parts.sampler.sample(some_RV, [rows[row] for row in plain])))
            problem = problem_of_draws(tokens, some_RV.shape, self._vocab_size, before_RV, NO_TOKEN)
            drawn = {row: token for row, token in zip(plain, tokens, strict=False) if token != NO_TOKEN}
        if shaped and not problem:
            probs_RV = cast(FinalRows, self._parts.sampler).final_rows(logits_RV[shaped], [rows[row] for row in shaped])
            problem = problem_of_final_rows(probs_RV, logits_RV[shaped], [drawn.get(row) for row in shaped])
            final = {} if problem else dict(zip(shaped, probs_RV, strict=True))
        if problem:
            raise ComponentFailure(self._parts.names["sampler"], problem)
        return drawn, final

    def _result(self, window: Window, run: Run, broken: dict[int, str], shown_RV: torch.Tensor) -> Drawn:
        """What to commit of a window and to tell of it; rows behind the run may be broken."""
        stop = run.first_row + len(run.token_ids)
        result = Drawn(run.token_ids, run.num_accepted)
        if run.num_accepted == len(run.token_ids):
            result.error = broken.get(stop, f"{self._parts.names['sampler']}: {NOTHING_LEFT}")
        if (num_top := window.sequence.request.params.logprobs) is not None:
            told = zip(shown_RV[run.first_row : stop, : self._vocab_size], run.token_ids, strict=True)
            result.logprobs = [_logprobs(row_V, token, num_top) for row_V, token in told]
        return result


@torch.inference_mode()
def _mask_window(logits_RV: torch.Tensor, drafts: tuple[int, ...], matcher: Matcher) -> None:
    """Mask each row with the grammar's state after the drafts before it; the matcher ends where it began.

    Rows behind a draft that the grammar refuses are left as they are: that draft has probability zero, so they are
    never reached.
    """
    width = logits_RV.shape[1]
    mask_W = np.zeros((width + 31) // 32, dtype=np.int32)
    for num_accepted in range(len(drafts) + 1):
        if num_accepted and matcher.terminated:
            break
        matcher.fill_mask(mask_W)
        allowed_V = np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:width].astype(bool)
        logits_RV[num_accepted, torch.from_numpy(~allowed_V).to(logits_RV.device)] = NEG_INF
        if num_accepted == len(drafts) or not matcher.accept(drafts[num_accepted]):
            break
    matcher.rollback(num_accepted)


def follow(matcher: Matcher, token: int) -> bool:
    """Advance a grammar by a committed token; whether it has come to its end."""
    if not matcher.accept(token):
        raise ValueError(f"refused token {token}, which its mask allowed")
    return bool(matcher.terminated)


def _logprobs(shown_V: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """An impossible token is not told among the most likely: its log-probability is no number."""
    logprobs_V = torch.log_softmax(shown_V.float(), dim=-1)
    top = torch.topk(logprobs_V, min(num_top, logprobs_V.numel()))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(
        token_id=token,
        logprob=float(logprobs_V[token]),
        rank=int((logprobs_V > logprobs_V[token]).sum()) + 1,
        top={one: logprob for one, logprob in pairs if logprob > NEG_INF},
    )
