"""From logits to committed tokens: hard masks, the sampler, and the verification of drafts by sample-and-compare.

Verification draws every position from the target's own row and goes on while the draw equals the draft, so the output
is what plain sampling with the same seed gives, whatever a drafter proposes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from pluglm.kernel.core import SampleRow, Sequence, Status, TokenLogprobs
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.guard import Guarded
from pluglm.kernel.interfaces.grammar import Matcher
from pluglm.kernel.interfaces.sampler import NO_TOKEN, Sampler

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
        request, output = self.sequence.request, self.sequence.output_token_ids
        return [
            SampleRow(
                params=request.params,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=output + list(self.drafts[:index]) if index else output,
                seed=request.seed,
                lane=self.sequence.lane,
                position=len(output) + index,
            )
            for index in range(len(self.drafts) + 1)
        ]


class Drawer:
    """Applies masks, calls the sampler, checks what it gave, verifies drafts; calls plugins through `attempting`."""

    def __init__(self, sampler: Sampler, attempt: Callable[..., Any], names: Mapping[str, str], num_ids: int) -> None:
        self._sampler, self._attempting, self._names = sampler, attempt, names
        self._vocab_size = num_ids  # ids the tokenizer knows; the head may have padding rows beyond

    def draw(self, logits_RV: torch.Tensor, windows: list[Window]) -> Guarded[list[Drawn]]:
        """One result per window, without tokens where a plugin failed and `attempting` ended the request.

        A broken row fails its own request, and only when verification gets to it. logits_RV is changed in place.
        """
        rows = [row for window in windows for row in window.sample_rows()]
        owners = [window.sequence for window in windows for _ in (*window.drafts, 0)]
        raw_RV = logits_RV.clone() if any(row.params.logprobs is not None for row in rows) else None
        if logits_RV.shape[1] > self._vocab_size:
            with torch.inference_mode():
                logits_RV[:, self._vocab_size :] = NEG_INF
        broken, is_all_possible = self._inspect(logits_RV, f"{self._names['step']} gave NaN or infinite logits")
        if any(window.sequence.matcher is not None for window in windows):
            yield from self._mask(logits_RV, windows)
            masked, is_all_possible = self._inspect(logits_RV, "the grammar allows no token here")
            broken = masked | broken
        usable = [row for row, owner in enumerate(owners) if row not in broken and owner.status is Status.RUNNING]
        drawn: list[int] | None = None
        if usable:
            some_RV = logits_RV if len(usable) == len(rows) else logits_RV[usable]
            sample = partial(self._sample, some_RV, [rows[row] for row in usable], is_all_possible)
            drawn = yield from self._attempting("sampler", dict.fromkeys(owners[row] for row in usable), sample)
        found = dict(zip(usable, drawn or [], strict=False))
        for row in [row for row, token in found.items() if token == NO_TOKEN]:
            broken[row] = f"{self._names['sampler']}: {NOTHING_LEFT}"
            del found[row]
        return self._verify(found, broken, windows, raw_RV)

    def _inspect(self, logits_RV: torch.Tensor, reason: str) -> tuple[dict[int, str], bool]:
        """Rows that nothing can be drawn from, and whether the others give every known id a positive probability.

        On the host by numpy, which starts no threads, and row by row only if there is something to find.
        """
        known_RV = logits_RV.detach()[:, : self._vocab_size]
        if known_RV.device.type == "cpu":
            host_RV = known_RV.numpy()
            if host_RV.min() > NEG_INF and host_RV.max() < -NEG_INF:  # false for NaN
                return {}, True
            lowest_R, best_R = host_RV.min(-1), host_RV.max(-1)
        else:
            lowest_R, best_R = torch.stack(torch.aminmax(known_RV, dim=-1)).cpu().numpy()
        return dict.fromkeys(np.flatnonzero(~np.isfinite(best_R)).tolist(), reason), NEG_INF not in lowest_R

    def _mask(self, logits_RV: torch.Tensor, windows: list[Window]) -> Guarded[None]:
        start = 0
        for window in windows:
            stop = start + len(window.drafts) + 1
            if window.sequence.matcher is not None:
                mask = partial(_mask_window, logits_RV[start:stop], window, window.sequence.matcher)
                yield from self._attempting("grammar", [window.sequence], mask)
            start = stop

    @torch.inference_mode()
    def _sample(self, logits_RV: torch.Tensor, rows: list[SampleRow], is_all_possible: bool) -> list[int]:
        """The sampler's ids, or ComponentFailure when it returned something that could never be a draw."""
        before_RV = None if is_all_possible else logits_RV.clone()  # the sampler may change what it gets
        tokens = [operator.index(token) for token in self._sampler.sample(logits_RV, rows)]
        num_rows, width = logits_RV.shape
        if len(tokens) != num_rows:
            raise ComponentFailure(self._names["sampler"], f"returned {len(tokens)} tokens for {num_rows} rows")
        if min(tokens) < NO_TOKEN or max(tokens) >= width:
            wrong = next(token for token in tokens if not NO_TOKEN <= token < width)
            raise ComponentFailure(self._names["sampler"], f"returned token id {wrong}, outside 0..{width - 1}")
        is_possible = max(tokens) < self._vocab_size
        if before_RV is not None:
            ids_R = torch.tensor(tokens, device=before_RV.device)
            chosen_R1 = before_RV.gather(1, ids_R.clamp(min=0).unsqueeze(1))[ids_R != NO_TOKEN]
            is_possible = NEG_INF not in chosen_R1.flatten().tolist()
        if not is_possible:
            raise ComponentFailure(self._names["sampler"], "drew a token of probability zero")
        return tokens

    def _verify(
        self, drawn: dict[int, int], broken: dict[int, str], windows: list[Window], raw_RV: torch.Tensor | None
    ) -> list[Drawn]:
        """Keep each window's draws up to and with the first that differs from its draft."""
        results, row = list[Drawn](), -1
        for window in windows:
            result, wanted = Drawn(), None if raw_RV is None else window.sequence.request.params.logprobs
            results.append(result)
            row, end = row + 1, row + len(window.drafts) + 1
            while row in drawn:
                result.token_ids.append(drawn[row])
                if wanted is not None and raw_RV is not None:
                    result.logprobs.append(_logprobs(raw_RV[row, : self._vocab_size], drawn[row], wanted))
                if not window.drafts or window.drafts[result.num_accepted : result.num_accepted + 1] != (drawn[row],):
                    break
                result.num_accepted, row = result.num_accepted + 1, row + 1
            result.error, row = broken.get(row), end
        return results


@torch.inference_mode()
def _mask_window(logits_RV: torch.Tensor, window: Window, matcher: Matcher) -> None:
    """Mask each row with the grammar's state after the drafts before it; the matcher ends where it began.

    Rows behind a draft that the grammar refuses are left as they are: that draft has probability zero, so they are
    never reached.
    """
    width = logits_RV.shape[1]
    mask_W = np.zeros((width + 31) // 32, dtype=np.int32)
    num_accepted = 0
    for index in range(len(window.drafts) + 1):
        matcher.fill_mask(mask_W)
        allowed_V = np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:width].astype(bool)
        logits_RV[index, torch.from_numpy(~allowed_V).to(logits_RV.device)] = NEG_INF
        if index == len(window.drafts) or not matcher.accept(window.drafts[index]):
            break
        num_accepted += 1
        if matcher.terminated:
            break
    matcher.rollback(num_accepted)


def follow(matcher: Matcher, token: int) -> bool:
    """Advance a grammar by a committed token; whether it has come to its end."""
    if not matcher.accept(token):
        raise ValueError(f"refused token {token}, which its mask allowed")
    return bool(matcher.terminated)


def _logprobs(raw_V: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Of the model's own row, before any mask or step."""
    logprobs_V = torch.log_softmax(raw_V.float(), dim=-1)
    top = torch.topk(logprobs_V, min(num_top, logprobs_V.numel()))
    return TokenLogprobs(
        token_id=token,
        logprob=float(logprobs_V[token]),
        rank=int((logprobs_V > logprobs_V[token]).sum()) + 1,
        top=dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )
