"""The policy against the contract kit that comes with pluglm, and the order that it is named for."""

from __future__ import annotations

import pytest
from pluglm_shortest.policy import ShortestPolicy

from pluglm.testing import Check, cases, kit
from pluglm.testing.context import make_context
from pluglm.testing.simulation import Job, world


@pytest.mark.parametrize("check", **cases(kit("scheduling_policy")(ShortestPolicy)))
def test_contract(check: Check) -> None:
    check.run()


def test_the_shortest_goes_first() -> None:
    sizes = {1: 30, 2: 3, 3: 12}
    jobs = [Job(sequence_id=one, arrival=0, num_prompt=size, max_new=4) for one, size in sizes.items()]
    policy = ShortestPolicy(ShortestPolicy.Config(), make_context())
    assert list(policy.order_waiting(world(jobs).view())) == [2, 3, 1]
