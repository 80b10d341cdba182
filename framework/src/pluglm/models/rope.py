"""Rotary embedding at run time: cosine and sine of each row, and the rotation of heads. Knows nothing of configs.

Angles are float32; cosine and sine are cast to the model's dtype, as transformers does.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pluglm.kernel.core import ModelInput
from pluglm.models.rope_frequencies import inverse_frequencies
from pluglm.models.rope_settings import RopeSettings

# T: rows, C: heads of any kind, H: head dim, F: H / 2, P: positions of the table

# Tables grow by whole blocks of one shape, so that a position's bits do not depend on when it was first needed.
_BLOCK = 128


class Rotary(Protocol):
    """Gives the cosine and the signed sine of rows; see `rotate` for the sign."""

    def prepare(self, num_positions: int) -> None:
        """Called before `rows` with the length of the longest sequence of the batch."""
        ...

    def rows(self, positions_T: torch.Tensor, lengths_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos_T1H and sin_T1H in the model's dtype; lengths_T as `rotary_lengths` gives them."""
        ...


class TableRotary:
    """A rotary embedding whose angles depend on the position only: a table that grows on demand."""

    def __init__(self, frequencies_F: torch.Tensor, attention_factor: float, dtype: torch.dtype, device: str) -> None:
        self._frequencies_F = frequencies_F
        self._attention_factor = attention_factor
        self._dtype = dtype
        self._device = device
        empty_P1H = torch.empty(0, 1, 2 * len(frequencies_F), dtype=dtype, device=device)
        self._cos_P1H, self._sin_P1H = empty_P1H, empty_P1H

    def prepare(self, num_positions: int) -> None:
        """Grows the table to at least `num_positions`, doubling."""
        have = len(self._cos_P1H)
        if num_positions <= have:
            return
        wanted = -(-max(num_positions, 2 * have) // _BLOCK) * _BLOCK
        blocks = [self._block(start) for start in range(have, wanted, _BLOCK)]
        self._cos_P1H = torch.cat([self._cos_P1H, *(cos for cos, _ in blocks)])
        self._sin_P1H = torch.cat([self._sin_P1H, *(sin for _, sin in blocks)])

    def rows(self, positions_T: torch.Tensor, lengths_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cos_P1H[positions_T], self._sin_P1H[positions_T]

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos_P1H and sin_P1H of all positions that were prepared."""
        return self._cos_P1H, self._sin_P1H

    def _block(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, start + _BLOCK, dtype=torch.float32)
        angles_PF = positions[:, None] * self._frequencies_F
        cos_P1H, sin_P1H = _widened(angles_PF, self._attention_factor)
        return cos_P1H.to(self._device, self._dtype), sin_P1H.to(self._device, self._dtype)


class DynamicRotary:
    """Dynamic NTK scaling (transformers' `dynamic`): past the original context the base grows with the length.

    Which length is a matter of the sequence alone, never of its batch mates: see `rotary_lengths`. Stored keys keep the
    rotation they were stored with - transformers does the same - so a query may meet keys of a smaller base.
    """

    def __init__(self, rope: RopeSettings, dtype: torch.dtype, device: str) -> None:
        self._rope = rope
        self._dtype = dtype
        self._exponents_F = (torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim).to(device)

    def prepare(self, num_positions: int) -> None:
        """Nothing to prepare: angles are computed for each row."""

    def rows(self, positions_T: torch.Tensor, lengths_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self._rope
        stretch_T = lengths_T.clamp(min=rope.original_max_position).double() / rope.original_max_position
        power = rope.head_dim / (rope.head_dim - 2)
        theta_T = rope.theta * (rope.factor * stretch_T - (rope.factor - 1)) ** power
        frequencies_TF = 1.0 / theta_T.float()[:, None] ** self._exponents_F
        cos_T1H, sin_T1H = _widened(positions_T.float()[:, None] * frequencies_TF, rope.attention_factor)
        return cos_T1H.to(self._dtype), sin_T1H.to(self._dtype)


def make_rotary(rope: RopeSettings, divisors_F: torch.Tensor | None, dtype: torch.dtype, device: str) -> Rotary:
    """The run-time form of `rope`; divisors_F as in `inverse_frequencies`."""
    if rope.kind == "dynamic":
        return DynamicRotary(rope, dtype, device)
    return TableRotary(inverse_frequencies(rope, divisors_F), rope.attention_factor, dtype, device)


def rotary_lengths(inputs: ModelInput) -> torch.Tensor:
    """lengths_T, int64: the sequence length that each row's rotation is made for (dynamic scaling only).

    A prompt's rows take the prompt's length, later ones their position + 1: what transformers uses for a prompt in
    one piece and greedy decoding, and the same for any chunks, batch mates, drafts and recomputation.
    """
    lengths_T = inputs.positions_T + 1
    for segment in inputs.segments:
        lengths_T[segment.query_start : segment.query_start + segment.num_query].clamp_(min=segment.num_prompt)
    return lengths_T


def rotate(x_TCH: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor) -> torch.Tensor:
    """x_TCH turned by its row's angles, element i paired with i + H/2. The first half of sin_T1H is negated."""
    return (x_TCH * cos_T1H).add_(x_TCH.roll(x_TCH.shape[-1] // 2, -1).mul_(sin_T1H))


def _widened(angles_TF: torch.Tensor, attention_factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    cos_TF, sin_TF = angles_TF.cos() * attention_factor, angles_TF.sin() * attention_factor
    return torch.cat((cos_TF, cos_TF), -1)[:, None], torch.cat((-sin_TF, sin_TF), -1)[:, None]
