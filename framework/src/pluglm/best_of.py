"""Of many outputs of one request, the best: those with the highest mean raw log-probability a token."""

from __future__ import annotations

import math

from pluglm.outputs import Completion, RequestOutput


def keep_best(output: RequestOutput, count: int, *, keeps_logprobs: bool) -> None:
    """The `count` best completions stay, best first, each with the lane that it was drawn in; the first is the output.

    Of equal ones the lower lane is better. Needs the log-probability of every token; they go where nobody asked for
    them. What ended the whole request remains its reason.
    """
    best = sorted(output.completions, key=lambda one: (-mean_logprob(one), one.lane))[:count]
    for one in best:
        one.logprobs = one.logprobs if keeps_logprobs else []
    output.completions = best
    if best:
        first = best[0]
        output.token_ids, output.text = first.token_ids, first.text
        output.logprobs, output.stop = first.logprobs, first.stop
        if output.finish_reason in ("stop", "length"):
            output.finish_reason = first.finish_reason


def mean_logprob(completion: Completion) -> float:
    """In nats a token, its end token included; -inf for one without tokens, or with NaN."""
    values = [one.logprob for one in completion.logprobs]
    mean = math.fsum(values) / len(values) if values else -math.inf
    return -math.inf if math.isnan(mean) else mean
