"""From logits to drafts: rows that nothing can be drawn from end their own sequence's drafts, and nobody else's."""

from __future__ import annotations

import math

import pytest
import torch

from pluglm_spec_decode import picking
from pluglm_spec_decode.picking import Drafted, pick

COINS = (0.2, 0.5, 0.8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("draws", [False, True])
def test_a_broken_row_ends_its_own_drafts(bad: float, draws: bool, caplog: pytest.LogCaptureFixture) -> None:
    picking._say_once.cache_clear()
    coins = COINS if draws else ()
    sound, broken = (Drafted(number, [1, 2], 3, coins, 1.0) for number in range(2))
    rows_RV = torch.tensor([[0.0, 3.0, -math.inf], [0.0, 1.0, 2.0]])
    pick({0: sound, 1: broken}, rows_RV, 5)
    kept = list(broken.drafts)
    rows_RV[1] = bad if bad == -math.inf else torch.tensor([0.0, bad, 1.0])
    for _ in range(2):
        pick({0: sound, 1: broken}, rows_RV, 5)
    assert (broken.drafts, broken.num_wanted) == (kept, 1)
    assert len(sound.drafts) == 3
    assert all(0 <= draft < 3 for draft in sound.drafts)
    assert len(sound.rows) == (3 if draws else 0)
    assert [record.message for record in caplog.records].count(
        "a drafter's logits are NaN or infinite, so its drafts end there; check its weights and the dtype"
    ) == 1
