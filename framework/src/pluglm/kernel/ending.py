"""What ends a request, and the numbers that its terminal event carries."""

from __future__ import annotations

from collections.abc import Set

from pluglm.kernel.core import FinishReason, RequestMetrics, Sequence


def ending(
    sequence: Sequence, token: int, stopped: str | None, terminated: bool, eos_token_ids: Set[int]
) -> tuple[FinishReason | None, str | int | None]:
    """Why the request is over after this token, and what stopped it; (None, None) when it goes on.

    A stop beats the length limit that the same token reaches. terminated: the grammar allows nothing more.
    """
    params = sequence.request.params
    if stopped is not None:
        return "stop", stopped
    is_eos = token in eos_token_ids and not params.ignore_eos
    if is_eos or token in params.stop_token_ids or terminated:
        return "stop", token
    return ("length", None) if sequence.num_output >= sequence.request.max_new_tokens else (None, None)


def metrics_of(sequence: Sequence, now_s: float) -> RequestMetrics:
    """Times are on the backend's clock."""
    return RequestMetrics(
        num_prompt_tokens=sequence.num_prompt,
        num_output_tokens=sequence.num_output,
        arrival_s=sequence.request.arrival_s,
        first_token_s=sequence.first_token_s,
        finished_s=now_s,
        num_preemptions=sequence.num_preemptions,
        num_drafted=sequence.num_drafted,
        num_accepted=sequence.num_accepted,
    )
