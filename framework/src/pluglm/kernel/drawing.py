"""From logits to committed tokens: hard masks, the sampler, and the verification of drafts by sample-and-compare.

Verification draws every position from the target's own row and goes on while the draw equals the draft, so the output
is what plain sampling with the same seed gives, whatever a drafter proposes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pluglm.kernel.core import SampleRow, Sequence, TokenLogprobs
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.interfaces.sampler import Sampler

# R: rows of the batch, V: logits per row, W: 32-bit words of a grammar mask
NEG_INF = float("-inf")


@dataclass(slots=True)
class Drawn:
    """What one sequence's rows gave: the tokens to commit (at least one), or why the request fails."""

    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Window:
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
                lane=0,
                position=len(output) + index,
            )
            for index in range(len(self.drafts) + 1)
        ]


class Drawer:
    """Applies masks, calls the sampler, checks what it returned, verifies drafts."""

    def __init__(self, sampler: Sampler, sampler_name: str, step_name: str, vocab_size: int) -> None:
        self._sampler, self._sampler_name, self._step_name = sampler, sampler_name, step_name
        self._vocab_size = vocab_size  # ids the tokenizer knows; the head may have padding rows beyond

    def draw(self, logits_RV: torch.Tensor, windows: list[Window]) -> list[Drawn]:
        """One result per window. A broken row fails its own request only."""
        results = [Drawn() for _ in windows]
        owners = [index for index, window in enumerate(windows) for _ in range(len(window.drafts) + 1)]
        rows = [row for window in windows for row in window.sample_rows()]
        want_logprobs = any(row.params.logprobs is not None for row in rows)
        raw_RV = logits_RV.clone() if want_logprobs else None
        if logits_RV.shape[1] > self._vocab_size:
            logits_RV[:, self._vocab_size :] = NEG_INF
        self._fail_rows(logits_RV, owners, results, f"{self._step_name} gave NaN or infinite logits")
        self._apply_grammars(logits_RV, windows, results)
        self._fail_rows(logits_RV, owners, results, "the grammar allows no token here")
        alive = [row for row, owner in enumerate(owners) if results[owner].error is None]
        if not alive:
            return results
        some_RV = logits_RV if len(alive) == len(rows) else logits_RV[alive]
        drawn = self._checked(self._sampler.sample(some_RV.clone(), [rows[row] for row in alive]), some_RV)
        self._verify(drawn, alive, owners, windows, results, raw_RV)
        return results

    def _fail_rows(self, logits_RV: torch.Tensor, owners: list[int], results: list[Drawn], reason: str) -> None:
        finite_R = torch.isfinite(logits_RV.amax(dim=-1)).tolist()
        for owner, finite in zip(owners, finite_R, strict=True):
            if not finite and results[owner].error is None:
                results[owner].error = reason

    def _apply_grammars(self, logits_RV: torch.Tensor, windows: list[Window], results: list[Drawn]) -> None:
        start = 0
        for window, result in zip(windows, results, strict=True):
            stop = start + len(window.drafts) + 1
            if window.sequence.matcher is not None and result.error is None:
                _mask_window(logits_RV[start:stop], window)
            start = stop

    def _checked(self, drawn: list[int], logits_RV: torch.Tensor) -> list[int]:
        """The sampler's ids, or ComponentFailure when it returned something that could never be a draw."""
        tokens = [int(token) for token in drawn]
        num_rows, width = logits_RV.shape
        if len(tokens) != num_rows:
            raise ComponentFailure(self._sampler_name, f"returned {len(tokens)} tokens for {num_rows} rows")
        wrong = [token for token in tokens if not 0 <= token < width]
        if wrong:
            raise ComponentFailure(self._sampler_name, f"returned token id {wrong[0]}, outside 0..{width - 1}")
        chosen_R = logits_RV[torch.arange(num_rows), torch.tensor(tokens)]
        if bool((chosen_R == NEG_INF).any()):
            raise ComponentFailure(self._sampler_name, "drew a token of probability zero")
        return tokens

    def _verify(
        self,
        drawn: list[int],
        alive: list[int],
        owners: list[int],
        windows: list[Window],
        results: list[Drawn],
        raw_RV: torch.Tensor | None,
    ) -> None:
        """Keep each window's draws up to and with the first that differs from its draft."""
        open_windows = {owner for owner in owners if results[owner].error is None}
        for token, row in zip(drawn, alive, strict=True):
            owner = owners[row]
            if owner not in open_windows:
                continue
            result, window = results[owner], windows[owner]
            place = len(result.token_ids)
            result.token_ids.append(token)
            wanted = window.sequence.request.params.logprobs
            if raw_RV is not None and wanted is not None:
                result.logprobs.append(_logprobs(raw_RV[row, : self._vocab_size], token, wanted))
            if place < len(window.drafts) and window.drafts[place] == token:
                result.num_accepted += 1
            else:
                open_windows.remove(owner)


def _mask_window(logits_RV: torch.Tensor, window: Window) -> None:
    """Mask each row with the grammar's state after the drafts before it; the matcher ends where it began.

    Rows behind a draft that the grammar refuses are left as they are: that draft has probability zero, so they are
    never reached.
    """
    matcher = window.sequence.matcher
    if matcher is None:
        return
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
