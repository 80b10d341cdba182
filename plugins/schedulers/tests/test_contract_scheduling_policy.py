"""The contract kit of scheduling policies on each of ours, with the configs under which they act differently."""

from __future__ import annotations

from typing import Any

import pytest

from pluglm.testing.scheduling_policy import scheduling_policy_checks
from pluglm_schedulers.deadline import DeadlineConfig, DeadlinePolicy
from pluglm_schedulers.fair import FairConfig, FairPolicy
from pluglm_schedulers.fcfs import FcfsConfig, FcfsPolicy
from pluglm_schedulers.mlfq import MlfqConfig, MlfqPolicy
from pluglm_schedulers.prefix_first import PrefixFirstConfig, PrefixFirstPolicy
from pluglm_schedulers.priority import PriorityConfig, PriorityPolicy
from pluglm_schedulers.shortest_first import ShortestFirstConfig, ShortestFirstPolicy

CASES: dict[str, tuple[type[Any], Any]] = {
    "deadline": (DeadlinePolicy, DeadlineConfig()),
    "deadline-of-given-times": (DeadlinePolicy, DeadlineConfig(step_s="10ms", token_s=0)),
    "fair": (FairPolicy, FairConfig()),
    "fair-with-dear-prompts": (FairPolicy, FairConfig(output_weight=0.5)),
    "fcfs": (FcfsPolicy, FcfsConfig()),
    "fcfs-that-skips": (FcfsPolicy, FcfsConfig(skip_blocked=2, long_prefill_share=1)),
    "mlfq": (MlfqPolicy, MlfqConfig()),
    "mlfq-of-short-quanta": (MlfqPolicy, MlfqConfig(quanta=(4, 8), boost="400ms")),
    "mlfq-that-offloads": (MlfqPolicy, MlfqConfig(quanta=(4, 8), boost=None, preemption="offload")),
    "mlfq-that-recomputes": (MlfqPolicy, MlfqConfig(quanta=(4, 8), boost=0.2, preemption="recompute")),
    "prefix_first": (PrefixFirstPolicy, PrefixFirstConfig()),
    "prefix_first-within-bounds": (PrefixFirstPolicy, PrefixFirstConfig(window=3, max_overtakes=2, ageing=0.1)),
    "priority": (PriorityPolicy, PriorityConfig()),
    "priority-with-ageing": (PriorityPolicy, PriorityConfig(ageing=0.05)),
    "shortest_first": (ShortestFirstPolicy, ShortestFirstConfig()),
    "shortest_first-without-ageing": (ShortestFirstPolicy, ShortestFirstConfig(ageing=None)),
}
CHECKS = {f"{name}-{check.name}": check for name, case in CASES.items() for check in scheduling_policy_checks(*case)}


@pytest.mark.parametrize("name", CHECKS)
def test_contract(name: str) -> None:
    CHECKS[name].run()
