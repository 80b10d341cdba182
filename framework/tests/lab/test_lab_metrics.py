"""Percentiles, goodput and rates against numbers worked out by hand."""

from __future__ import annotations

import pytest

from pluglm.lab.metrics import Targets, summarize, summarize_groups
from pluglm.lab.replay import Outcome
from pluglm.lab.trace import TraceRequest
from pluglm.verification.counts import SpeculationCounts


def outcome(arrival: float, first: float | None, end: float, num_output: int = 5, reason="length", **fields) -> Outcome:
    own = {key: fields.pop(key) for key in ("tenant", "priority", "deadline_s") if key in fields}
    request = TraceRequest(request_id="r", arrival_s=arrival, prompt=(("r", 8),), output_tokens=5, **own)
    return Outcome(
        request=request,
        finish_reason=reason,
        arrival_s=arrival,
        first_token_s=first,
        finished_s=end,
        num_prompt=8,
        num_output=num_output,
        **fields,
    )


def test_times_of_one_request():
    one = outcome(1.0, 3.0, 11.0)
    assert (one.ttft_s, one.tpot_s, one.total_s) == (2.0, 2.0, 10.0)
    assert outcome(1.0, 3.0, 3.0, num_output=1).tpot_s is None
    assert outcome(1.0, None, 3.0, num_output=0).ttft_s is None


def test_percentiles_are_interpolated_over_completed_requests():
    """1..101 seconds: the percentile p is 1 + p. One that was cancelled does not count."""
    outcomes = [outcome(0.0, float(n), 200.0) for n in range(1, 102)]
    outcomes.append(outcome(0.0, 5000.0, 6000.0, reason="cancelled"))
    times = summarize(outcomes, Targets()).ttft
    assert (times.p50, times.p90, times.p99, times.mean) == (51.0, 91.0, 100.0, 51.0)


def test_drafts_of_all_requests_add_up():
    """4 windows of 5 tokens and 1 of 3; one request was refused. Two of three first drafts, one of two second ones."""
    long = SpeculationCounts(num_windows=4, num_tokens=5, drafted_by_position=(2, 1), accepted_by_position=(1, 0))
    short = SpeculationCounts(num_windows=1, num_tokens=3, drafted_by_position=(1, 1), accepted_by_position=(1, 1))
    outcomes = [outcome(0.0, 1.0, 5.0, speculation=one) for one in (long, short)]
    outcomes.append(outcome(0.0, None, 0.0, num_output=0, reason="refused"))
    summary = summarize(outcomes, Targets())
    assert summary.speculation.tokens_per_step == 8 / 5
    assert summary.speculation.acceptance_by_position == (2 / 3, 1 / 2)
    assert summary.to_json()["speculation"]["accepted_per_step"] == 3 / 5


def test_goodput_counts_what_kept_its_targets_and_its_deadline():
    """Over the 20 seconds from the first arrival to the last end."""
    outcomes = [
        outcome(0.0, 1.0, 5.0),  # ttft 1, tpot 1
        outcome(0.0, 3.0, 7.0),  # ttft 3
        outcome(0.0, 1.0, 13.0),  # tpot 3
        outcome(0.0, 1.0, 5.0, deadline_s=5.0),
        outcome(0.0, 1.0, 5.0, deadline_s=4.9),
        outcome(0.0, 1.0, 1.0, num_output=1),  # no tpot to keep
        outcome(0.0, 1.0, 20.0, num_output=2, reason="deadline", deadline_s=20.0),
    ]
    summary = summarize(outcomes, Targets(ttft_s=2.0, tpot_s=2.0))
    assert summary.num_good == 3
    assert summary.goodput_requests_per_s == 3 / 20
    assert summary.goodput_tokens_per_s == (5 + 5 + 1) / 20
    assert summary.requests_per_s == 6 / 20
    assert summary.output_tokens_per_s == (5 * 5 + 1 + 2) / 20
    assert summarize(outcomes, Targets()).num_good == 5
    assert summarize(outcomes, Targets(ttft_s=2.0)).num_good == 4


def test_counts_and_the_hit_rate():
    outcomes = [
        outcome(0.0, 1.0, 2.0, num_preemptions=3, num_recomputed=9, num_cached=4),
        outcome(0.0, 1.0, 2.0, num_preemptions=1, num_recomputed=2, num_cached=9),  # its 8 prompt tokens, and one again
        outcome(0.0, None, 0.0, num_output=0, reason="refused"),
        Outcome(request=outcome(0, 0, 0).request, finish_reason="not_sent"),
    ]
    summary = summarize(outcomes, Targets())
    assert (summary.num_preemptions, summary.most_preemptions, summary.num_recomputed_tokens) == (4, 3, 11)
    assert (summary.num_prompt_tokens, summary.num_cached_tokens, summary.cache_hit_rate) == (16, 12, 0.75)
    assert summary.reasons == {"length": 2, "refused": 1, "not_sent": 1}
    assert summary.num_requests == 4


def test_nothing_completed_gives_no_times_and_no_rates():
    summary = summarize([outcome(1.0, None, 1.0, num_output=0, reason="refused")], Targets())
    assert summary.ttft.p50 is summary.total.p99 is None
    assert (summary.goodput_tokens_per_s, summary.cache_hit_rate) == (0.0, 0.0)


@pytest.mark.parametrize(("by", "names"), [("tenant", ["a", "b"]), ("priority", ["0", "5"])])
def test_rates_of_groups_add_up(by: str, names: list[str]):
    outcomes = [outcome(0.0, 1.0, 4.0, tenant="a"), outcome(6.0, 8.0, 10.0, tenant="b", priority=5)]
    groups, whole = summarize_groups(outcomes, Targets(), by), summarize(outcomes, Targets())
    assert list(groups) == names
    assert [one.ttft.p50 for one in groups.values()] == [1.0, 2.0]
    assert sum(one.goodput_tokens_per_s for one in groups.values()) == whole.goodput_tokens_per_s == 1.0
