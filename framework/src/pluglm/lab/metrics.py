"""What a replay came to: latency percentiles, goodput, throughput and counts. Knows outcomes, not how they came about.

Goodput: requests, or their tokens, per second that ended in time (DistServe, Zhong et al., OSDI 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pluglm.lab.replay import Outcome
from pluglm.verification.counts import SpeculationCounts

PERCENTILES = (50, 90, 99)
REASONS = ("stop", "length", "cancelled", "deadline", "error", "refused", "not_sent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a request must keep, in seconds, to count for goodput; its own deadline comes on top. None: anything."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def kept_by(self, outcome: Outcome) -> bool:
        """It got all its tokens, and in time. A request of one token has no time per output token to keep."""
        if not outcome.completed:
            return False
        limits = ((outcome.ttft_s, self.ttft_s), (outcome.tpot_s, self.tpot_s))
        deadline = (outcome.total_s, outcome.request.deadline_s)
        return all(time is None or limit is None or time <= limit for time, limit in (*limits, deadline))


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Percentiles in seconds, interpolated linearly, of requests that completed; None when there are none."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Times:
        known = [one for one in seconds if one is not None]
        if not known:
            return cls(mean=None, p50=None, p90=None, p99=None)
        p50, p90, p99 = np.percentile(known, PERCENTILES).tolist()
        return cls(mean=float(np.mean(known)), p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of one replay. Rates are per second of `seconds`, from the first arrival to the last end.

    reasons: how many requests ended in each way. ttft, tpot, total: of completed requests. cache_hit_rate: the share of
    all admitted requests' prompt tokens that were adopted instead of computed; of what a request adopts again after a
    preemption, no more than its prompt counts. speculation: of all requests; a simulation has no drafts.
    """

    num_requests: int
    reasons: dict[str, int]
    seconds: float
    ttft: Times
    tpot: Times
    total: Times
    num_good: int
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    requests_per_s: float
    output_tokens_per_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    most_preemptions: int
    num_recomputed_tokens: int
    num_cached_tokens: int
    cache_hit_rate: float
    speculation: SpeculationCounts

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self) | {"speculation": self.speculation.to_json()}


def summarize(outcomes: Sequence[Outcome], targets: Targets, seconds: float | None = None) -> Summary:
    """Of the requests given. seconds: what rates are taken over; None is their own span."""
    completed = [one for one in outcomes if one.completed]
    good = [one for one in completed if targets.kept_by(one)]
    admitted = [one for one in outcomes if one.finish_reason not in ("refused", "not_sent")]
    seconds = span_s(outcomes) if seconds is None else seconds
    counts = Counter(str(one.finish_reason) for one in outcomes)
    num_prompt, num_cached = (
        sum(one.num_prompt for one in admitted),
        sum(min(one.num_cached, one.num_prompt) for one in admitted),
    )

    def rate(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return Summary(
        num_requests=len(outcomes),
        reasons={reason: counts[reason] for reason in REASONS if counts[reason]},
        seconds=seconds,
        ttft=Times.of(one.ttft_s for one in completed),
        tpot=Times.of(one.tpot_s for one in completed),
        total=Times.of(one.total_s for one in completed),
        num_good=len(good),
        goodput_requests_per_s=rate(len(good)),
        goodput_tokens_per_s=rate(sum(one.num_output for one in good)),
        requests_per_s=rate(len(completed)),
        output_tokens_per_s=rate(sum(one.num_output for one in outcomes)),
        num_prompt_tokens=num_prompt,
        num_output_tokens=sum(one.num_output for one in outcomes),
        num_preemptions=sum(one.num_preemptions for one in outcomes),
        most_preemptions=max((one.num_preemptions for one in outcomes), default=0),
        num_recomputed_tokens=sum(one.num_recomputed for one in outcomes),
        num_cached_tokens=num_cached,
        cache_hit_rate=num_cached / num_prompt if num_prompt else 0.0,
        speculation=sum((one.speculation for one in outcomes), SpeculationCounts()),
    )


def span_s(outcomes: Sequence[Outcome]) -> float:
    """From the first arrival to the last end."""
    arrivals = [one.arrival_s for one in outcomes if one.arrival_s is not None]
    ends = [one.finished_s for one in outcomes if one.finished_s is not None]
    return max(ends) - min(arrivals) if ends and arrivals else 0.0


GROUPS: dict[str, Callable[[Outcome], str]] = {
    "tenant": lambda outcome: outcome.request.tenant,
    "priority": lambda outcome: str(outcome.request.priority),
}


def summarize_groups(outcomes: Sequence[Outcome], targets: Targets, by: str) -> dict[str, Summary]:
    """One summary for each tenant, or for each priority; rates over the span of all, so that they add up."""
    seconds, group_of = span_s(outcomes), GROUPS[by]
    names = sorted({group_of(one) for one in outcomes})
    groups = {name: [one for one in outcomes if group_of(one) == name] for name in names}
    return {name: summarize(some, targets, seconds) for name, some in groups.items()}
