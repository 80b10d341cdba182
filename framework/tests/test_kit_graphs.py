"""Recorded graphs: they replay on new contents, keep what the host decided, and refuse what makes the host wait."""

from __future__ import annotations

import pytest
import torch

from pluglm.testing.graphs import RecordingTools, WaitError


def test_a_recorded_function_runs_again_on_new_contents() -> None:
    """Views, results in place, new tensors, and a number that the host had when it was recorded."""
    number, x_TD = 2.0, torch.ones(2, 3)
    state_T = torch.zeros(2)

    def function() -> torch.Tensor:
        state_T.add_(1)
        doubled_TD = x_TD[:, :2] * number
        doubled_TD[0].mul_(10)
        return doubled_TD.sum(1) + state_T

    captured = RecordingTools().capture(function)
    address = captured.output.data_ptr()
    number = 5.0  # comes too late
    x_TD.copy_(torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]]))
    state_T.zero_()
    captured.replay()
    assert captured.output.tolist() == [(1 + 2) * 2 * 10 + 1, (3 + 4) * 2 + 1]
    captured.replay()
    assert captured.output.tolist() == [62, 16]
    assert captured.output.data_ptr() == address


HOST_WAITS = {
    "item": lambda one: one.item(),
    "bool": lambda one: bool(one),
    "nonzero": lambda one: torch.nonzero(one),
    "where": lambda one: torch.where(one),
    "mask": lambda one: one[one > 0],
    "mask written": lambda one: one.masked_select(one > 0),
    "equal": lambda one: torch.equal(one, one),
    "unique": lambda one: torch.unique(one),
    "repeats": lambda one: torch.repeat_interleave(one, one.long()),
    "made of host data": lambda one: torch.tensor([1]),
}


@pytest.mark.parametrize("is_inference", [True, False])
@pytest.mark.parametrize("name", HOST_WAITS)
def test_a_recorded_graph_refuses_what_makes_the_host_wait(name: str, is_inference: bool) -> None:
    one = torch.ones(1)
    with torch.inference_mode(is_inference), pytest.raises(WaitError):
        RecordingTools().capture(lambda: HOST_WAITS[name](one))
