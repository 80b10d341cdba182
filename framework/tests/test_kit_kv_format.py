"""The kit of KV formats is tested: plain rounding to int8 passes, and each check has one that fails only that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv_format import KVRow, SymmetricCodes
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.kv_format import kv_format_checks
from pluglm.testing.kv_formats import NibbleKV

# T: tokens, K: kv heads, H: head dim

CODES = SymmetricCodes(value_dtype=torch.int8, limit=127.0, least_scale=1e-12)
Encoded = tuple[torch.Tensor, torch.Tensor]


class RoundingKV:
    """int8 codes and a scale a row. It says nothing of its arithmetic."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, device: str, dtype: torch.dtype) -> None:
        self.last: torch.Tensor | None = None

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def row(self, head_dim: int) -> KVRow:
        return KVRow(code_dtype=torch.int8, num_codes=head_dim, scale_dtype=torch.float32, num_scales=1)

    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        x_TKH = x_TKH.float()
        scales = (x_TKH.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
        scales = scales.where(scales.isfinite(), float("nan"))
        return (x_TKH / scales).clamp(-127, 127).round().nan_to_num(nan=0.0).to(torch.int8), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return codes.float() * scales

    def symmetric(self) -> SymmetricCodes | None:
        return None


class DeclaredKV(RoundingKV):
    def symmetric(self) -> SymmetricCodes:
        return CODES


class CountsInFractions(RoundingKV):
    def row(self, head_dim: int) -> KVRow:
        num_codes: Any = head_dim / 1
        return KVRow(code_dtype=torch.int8, num_codes=num_codes, scale_dtype=torch.float32, num_scales=1)


class MiscountsScales(RoundingKV):
    def row(self, head_dim: int) -> KVRow:
        return KVRow(code_dtype=torch.int8, num_codes=head_dim, scale_dtype=torch.float32, num_scales=2)


class StoresFloats(RoundingKV):
    """Codes as halves hold them, which some devices cannot copy by index in other float types."""

    def row(self, head_dim: int) -> KVRow:
        return KVRow(code_dtype=torch.float16, num_codes=head_dim, scale_dtype=torch.float32, num_scales=1)

    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        codes, scales = super().encode(x_TKH)
        return codes.half(), scales


class DropsTheLastOfOddRows(RoundingKV):
    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        codes, scales = super().encode(x_TKH)
        if x_TKH.shape[-1] % 2:
            codes[..., -1] = 0
        return codes, scales


class OneScaleForAll(RoundingKV):
    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        codes, scales = super().encode(x_TKH)
        if len(x_TKH) == 24:
            scales = scales.amax().expand_as(scales).clone()
            codes = (x_TKH / scales).round().to(torch.int8)
        return codes, scales


class DividesInTheRunsType(RoundingKV):
    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        codes, scales = super().encode(x_TKH)
        return (codes, scales) if x_TKH.dtype == torch.float32 else (codes, scales.to(x_TKH.dtype).float())


class DecodesToDouble(RoundingKV):
    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        x_TKH = super().decode(codes, scales)
        return x_TKH.double() if codes.shape == (7, 3, 64) else x_TKH


class NoZero(RoundingKV):
    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return super().decode(codes, scales) + 1e-14 * (codes == 0)


class HalfScales(RoundingKV):
    """Beyond what float16 holds it clips."""

    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        scales = super().encode(x_TKH)[1].clamp(max=65504)
        return (x_TKH.float() / scales).clamp(-127, 127).round().nan_to_num(nan=0.0).to(torch.int8), scales


class HidesNaN(RoundingKV):
    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        return super().encode(x_TKH.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0))


class KeepsTheLargestScale(RoundingKV):
    """Of all tokens that are encoded together, where one is far larger."""

    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        codes, scales = super().encode(x_TKH)
        if len(x_TKH) in (2, 19, 40) and x_TKH.abs().amax() > 1e3 and x_TKH.abs().amax() < 1e6:
            return codes, scales * (1 + 2**-20)
        return codes, scales


class DecodesByPlace(RoundingKV):
    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        x_TKH = super().decode(codes, scales)
        return x_TKH if codes.shape != (30, 2, 64) else x_TKH + torch.arange(30)[:, None, None] * 1e-3


class NeedsAToken(RoundingKV):
    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return super().decode(codes, scales) if len(codes) else torch.zeros(1, 3, 64)


class ScalesInPlace(RoundingKV):
    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        encoded = super().encode(x_TKH)
        if len(x_TKH) == 9:
            x_TKH.div_(encoded[1])
        return encoded


class AdaptsToWhatCame(RoundingKV):
    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        codes, scales = super().encode(x_TKH)
        grown = 1.0 if self.last is None else 1.01
        self.last = scales
        return codes, scales * grown


class RoundsTowardsZero(DeclaredKV):
    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        codes, scales = super().encode(x_TKH)
        return (x_TKH / scales).nan_to_num(nan=0.0).trunc().to(torch.int8) if len(x_TKH) == 20 else codes, scales


BROKEN: dict[str, type[RoundingKV]] = {
    "row_describes_memory": CountsInFractions,
    "encodes_what_row_says": MiscountsScales,
    "codes_are_integers": StoresFloats,
    "odd_head_dims_work_or_are_refused": DropsTheLastOfOddRows,
    "rows_come_back": OneScaleForAll,
    "half_types_are_read_exactly": DividesInTheRunsType,
    "decodes_to_float32": DecodesToDouble,
    "zeros_stay_zeros": NoZero,
    "huge_numbers_come_back": HalfScales,
    "spoilt_rows_stay_spoilt": HidesNaN,
    "rows_are_encoded_alone": KeepsTheLargestScale,
    "rows_are_decoded_in_any_order": DecodesByPlace,
    "no_tokens_are_no_rows": NeedsAToken,
    "nothing_given_is_changed": ScalesInPlace,
    "encoding_leaves_no_state": AdaptsToWhatCame,
    "declared_arithmetic_is_its_own": RoundsTowardsZero,
}


@pytest.mark.parametrize("cls", [RoundingKV, DeclaredKV, NibbleKV])
def test_plain_formats_pass(cls: type[Any]) -> None:
    report = run_checks(kv_format_checks(cls))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in kv_format_checks(RoundingKV)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_format_fails_exactly_its_check(name: str) -> None:
    report = run_checks(kv_format_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
