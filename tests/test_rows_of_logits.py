"""Which rows of logits a token can be drawn from, whatever is in them: Drawer against the definition, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from pluglm.kernel.core import Request, SampleRow, Sequence, Status
from pluglm.kernel.drawing import Drawer, Drawn, Window
from pluglm.kernel.sampling_params import SamplingParams

# R: rows, V: vocabulary

LARGEST = float(torch.finfo(torch.float32).max)  # the sum of two overflows
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, LARGEST, -LARGEST, math.inf, -math.inf, math.nan, 1e-45]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)


class FirstBest:
    """The sampler: of each row the best id by Python's own comparison, the lowest on ties."""

    def sample(self, logits_RV: torch.Tensor, rows: list[SampleRow]) -> list[int]:
        return [row.index(max(row)) for row in logits_RV.tolist()]


def draw(rows: list[list[float]], vocab_size: int) -> list[Drawn]:
    params = SamplingParams(temperature=0.0)
    request = Request(request_id="r", prompt_token_ids=(0,), params=params, seed=0, arrival_s=0.0, max_new_tokens=9)
    windows = [
        Window(Sequence(sequence_id=number, request=request, token_ids=[0], status=Status.RUNNING), ())
        for number in range(len(rows))
    ]
    parts: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(vocab_size=vocab_size),
        names={"step": "model 'm'", "sampler": "sampler 's'"},
        sampler=FirstBest(),
        verification="reproducible",
    )

    def attempting(slot: str, touched: Any, call: Callable[[], Any]) -> Generator[Any, Any, Any]:
        yield from ()
        return call()

    steps = Drawer(parts, attempting).draw(torch.tensor(rows, dtype=torch.float32), windows)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        found: list[Drawn] = end.value
        return found


@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2))
def test_a_row_is_drawn_from_if_its_best_known_logit_is_finite(
    data: st.DataObject, num_rows: int, vocab_size: int, num_padding: int
) -> None:
    size = vocab_size + num_padding
    rows = data.draw(st.lists(st.lists(VALUES, min_size=size, max_size=size), min_size=num_rows, max_size=num_rows))
    for row, drawn in zip(rows, draw(rows, vocab_size), strict=True):
        known = row[:vocab_size]
        if any(map(math.isnan, known)) or not math.isfinite(max(known)):
            assert (drawn.token_ids, drawn.error) == ([], "model 'm' gave NaN or infinite logits")
        else:
            assert (drawn.token_ids, drawn.error) == ([known.index(max(known))], None)


def test_finite_logits_whose_sum_is_not_are_drawn_from() -> None:
    assert [one.token_ids for one in draw([[LARGEST, LARGEST], [-LARGEST, -LARGEST]], 2)] == [[0], [0]]
    assert draw([[LARGEST, -LARGEST, -LARGEST, -LARGEST]], 4)[0].token_ids == [0]
