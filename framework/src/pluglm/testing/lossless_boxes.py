"""Exact laws of functions of uniforms that are constant on boxes: the volume of each box. Knows no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# B: boxes, C: cases, A: axes (one for each uniform), E: corners of a box, 2 ** A of them

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Evaluate = Callable[[Ints, Floats], Ints]

NUM_BISECTIONS = 32
MAX_BOXES = 4000  # not whole, for each case: rules need hundreds
LEAST, MOST = 2.0**-53, 1.0 - 2.0**-53  # uniforms are in the open interval


class _Boxes(NamedTuple):
    case_B: Ints
    low_BA: Floats
    high_BA: Floats

    def chosen(self, which_B: npt.NDArray[np.bool_]) -> _Boxes:
        return _Boxes(self.case_B[which_B], self.low_BA[which_B], self.high_BA[which_B])


def measure(evaluate: Evaluate, num_cases: int, num_axes: int, num_codes: int) -> Floats:
    """The chance of every code, [C, num_codes], each within 2 ** -32 for every box that it has; no randomness.

    evaluate: cases [N] and uniforms [N, A] to codes [N]. A box is taken as constant when its corners and its centre
    agree, so each uniform alone must move the code through its values without coming back to an earlier one, as
    thresholds and inverse distribution functions do. Any other box is cut where the code changes on an edge.
    ValueError for codes that are found to be no such function.
    """
    law_CK = np.zeros((num_cases, num_codes))
    boxes = _Boxes(np.arange(num_cases), np.zeros((num_cases, num_axes)), np.ones((num_cases, num_axes)))
    corners_EA = (np.arange(2**num_axes)[:, None] >> np.arange(num_axes)) & 1
    while len(boxes.case_B) <= MAX_BOXES * num_cases:
        points_BEA = np.where(corners_EA, boxes.high_BA[:, None], boxes.low_BA[:, None]).clip(LEAST, MOST)
        centre_B1A = (boxes.low_BA[:, None] + boxes.high_BA[:, None]) / 2
        codes_BE = _evaluate_all(evaluate, boxes.case_B, np.concatenate([points_BEA, centre_B1A], 1))
        codes_BE, centre_B = codes_BE[:, :-1], codes_BE[:, -1]
        is_whole_B = (codes_BE == codes_BE[:, :1]).all(1)
        if (centre_B != codes_BE[:, 0])[is_whole_B].any():
            break
        whole = boxes.chosen(is_whole_B)
        np.add.at(law_CK, (whole.case_B, codes_BE[is_whole_B, 0]), (whole.high_BA - whole.low_BA).prod(1))
        if is_whole_B.all():
            return law_CK
        boxes = _cut(evaluate, boxes.chosen(~is_whole_B), codes_BE[~is_whole_B], points_BEA[~is_whole_B])
    raise ValueError(
        "the code is no step function of the uniforms: equal corners around another centre, or no end of boxes"
    )


def _evaluate_all(evaluate: Evaluate, case_B: Ints, points_BPA: Floats) -> Ints:
    num_points, num_axes = points_BPA.shape[1:]
    return evaluate(case_B.repeat(num_points), points_BPA.reshape(-1, num_axes)).reshape(-1, num_points)


def _cut(evaluate: Evaluate, boxes: _Boxes, codes_BE: Ints, points_BEA: Floats) -> _Boxes:
    """Two boxes for each, cut across the axis along which most edges change."""
    num_boxes, num_axes = boxes.low_BA.shape
    corners = np.arange(codes_BE.shape[1])
    starts_AH = np.stack([corners[(corners >> axis) & 1 == 0] for axis in range(num_axes)])  # half of the corners
    ends_AH = starts_AH | (1 << np.arange(num_axes))[:, None]
    changes_BAH = codes_BE[:, starts_AH] != codes_BE[:, ends_AH]
    every_B = np.arange(num_boxes)
    axis_B = changes_BAH.sum(2).argmax(1)
    start_B = starts_AH[axis_B, changes_BAH[every_B, axis_B].argmax(1)]
    point_BA, code_B = points_BEA[every_B, start_B].copy(), codes_BE[every_B, start_B]
    below_B, above_B = boxes.low_BA[every_B, axis_B], boxes.high_BA[every_B, axis_B]
    for _ in range(NUM_BISECTIONS):
        middle_B = (below_B + above_B) / 2
        point_BA[every_B, axis_B] = middle_B
        is_same_B = evaluate(boxes.case_B, point_BA) == code_B
        below_B, above_B = np.where(is_same_B, middle_B, below_B), np.where(is_same_B, above_B, middle_B)
    low_BA, high_BA = boxes.low_BA.copy(), boxes.high_BA.copy()
    high_BA[every_B, axis_B], low_BA[every_B, axis_B] = below_B, above_B
    return _Boxes(
        np.concatenate([boxes.case_B, boxes.case_B]),
        np.concatenate([boxes.low_BA, low_BA]),
        np.concatenate([high_BA, boxes.high_BA]),
    )
