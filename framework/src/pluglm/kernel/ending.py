"""What ends a request, and the numbers that its terminal event carries."""

from __future__ import annotations

from collections.abc import Collection, Set

from pluglm.kernel.core import FinishReason, RequestMetrics, Sequence
from pluglm.verification.counts import SpeculationCounts


def ending(
    sequence: Sequence, token: int, stopped: str | None, terminated: bool, eos_token_ids: Set[int]
) -> tuple[FinishReason | None, str | int | None]:
    """Why the request is over after this token, and what stopped it; (None, None) when it goes on.

    A stop beats the length limit that the same token reaches. terminated: the grammar allows nothing more.
    """
    params, num_output = sequence.request.params, len(sequence.output_token_ids)
    if stopped is not None:
        return "stop", stopped
    if (token in eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids or terminated:
        return "stop", token
    return ("length", None) if num_output >= sequence.request.max_new_tokens else (None, None)


def metrics_of(lanes: Collection[Sequence], now_s: float) -> RequestMetrics:
    """Of all sequences of one request. Times are on the backend's clock."""
    request = next(iter(lanes)).request
    return RequestMetrics(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=sum(one.num_output for one in lanes if one.walk is None),  # nobody saw those of a search
        arrival_s=request.arrival_s,
        first_token_s=min((one.first_token_s for one in lanes if one.first_token_s is not None), default=None),
        finished_s=now_s,
        num_preemptions=sum(one.num_preemptions for one in lanes),
        speculation=SpeculationCounts.of(one.windows for one in lanes),
        num_cached_tokens=sum(one.num_cached for one in lanes),
        num_loaded_tokens=sum(one.num_loaded for one in lanes),
        num_recomputed_tokens=sum(one.num_recomputed for one in lanes),
    )
