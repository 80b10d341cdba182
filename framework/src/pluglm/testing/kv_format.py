"""The contract kit of KV formats: rows come back near what they were, each by itself, and faults stay visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pluglm.assembly.checked_format import row_fault
from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.kv_format import KVFormat, SymmetricCodes
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import common_checks

# T: tokens, K: kv heads, H: head dim, C: codes of a row, G: scales of a row, V: numbers that a code can stand for

HUGE = 3e38  # near the largest float32
Encoded = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The class under test. max_error: largest error of a number as a share of its row's largest."""

    cls: type[Any]
    config: Any
    device: str
    max_error: float

    def build(self) -> KVFormat:
        kv_format: KVFormat = self.cls(self.config, self.device, torch.float32)
        return kv_format

    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        """On the CPU."""
        codes, scales = self.build().encode(x_TKH.clone().to(self.device))
        return codes.cpu(), scales.cpu()

    def decode(self, encoded: Encoded) -> torch.Tensor:
        codes, scales = (one.clone().to(self.device) for one in encoded)
        return self.build().decode(codes, scales).cpu()

    def stands_for(self, x_TKH: torch.Tensor) -> torch.Tensor:
        """What is read of x once it is stored."""
        return self.decode(self.encode(x_TKH))


def kv_format_checks(
    cls: type[Any], config: Any = None, *, device: str = "cpu", max_error: float = 0.15
) -> Iterator[Check]:
    """Every check of a KV format."""
    config = cls.Config() if config is None else config
    subject = Subject(cls=cls, config=config, device=device, max_error=max_error)
    yield from common_checks("kv_format", cls, config, subject.build)
    for function in ALWAYS:
        yield make_check(function, subject)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expect_near(subject: Subject, x_TKH: torch.Tensor) -> None:
    error_TKH = (subject.stands_for(x_TKH).double() - x_TKH.double()).abs()
    share = float((error_TKH / x_TKH.double().abs().amax(-1, keepdim=True)).nan_to_num(nan=float("inf")).max())
    expect(share <= subject.max_error, f"numbers within {subject.max_error} of their row's largest", f"{share:.3g}")


def row_describes_memory(subject: Subject) -> None:
    for head_dim in (16, 64, 80):
        fault = row_fault(subject.build().row(head_dim))
        expect(fault is None, f"a KVRow of torch dtypes and whole numbers from row({head_dim})", fault)


def encodes_what_row_says(subject: Subject) -> None:
    for head_dim in (16, 64, 80):
        row = subject.build().row(head_dim)
        codes, scales = subject.encode(normal(5, 3, head_dim))
        found = (tuple(codes.shape), codes.dtype, tuple(scales.shape), scales.dtype)
        expected = ((5, 3, row.num_codes), row.code_dtype, (5, 3, row.num_scales), row.scale_dtype)
        expect(found == expected, f"codes and scales {expected}, as row({head_dim}) says", found)


def codes_are_integers(subject: Subject) -> None:
    dtype = subject.build().row(64).code_dtype
    expect(not dtype.is_floating_point and not dtype.is_complex, "an integer code_dtype", dtype)


def odd_head_dims_work_or_are_refused(subject: Subject) -> None:
    for head_dim in (1, 5, 33):
        try:
            subject.build().row(head_dim)
        except IncompatibleError:
            continue
        expect_near(subject, normal(4, 1, head_dim))


def rows_come_back(subject: Subject) -> None:
    """Of sizes that differ by far: each is close relative to itself."""
    expect_near(subject, normal(24, 2, 64) * torch.logspace(-6, 6, 24)[:, None, None])


def half_types_are_read_exactly(subject: Subject) -> None:
    """Numbers of a half type are encoded as the same numbers in float32 are."""
    for dtype in (torch.bfloat16, torch.float16):
        x_TKH = normal(6, 2, 64).to(dtype)
        same = all(map(torch.equal, subject.encode(x_TKH), subject.encode(x_TKH.float())))
        expect(same, f"the codes and scales of the same numbers in float32 for {dtype}", "others")


def decodes_to_float32(subject: Subject) -> None:
    found = subject.stands_for(normal(7, 3, 64))
    expect((found.shape, found.dtype) == ((7, 3, 64), torch.float32), "float32 [7, 3, 64]", (found.shape, found.dtype))


def zeros_stay_zeros(subject: Subject) -> None:
    x_TKH = normal(4, 2, 64, seed=2)
    x_TKH[1], x_TKH[2, 1] = 0, 0
    found = subject.stands_for(x_TKH)
    rest = (found[1], found[2, 1])
    expect(all(bool((one == 0).all()) for one in rest), "exactly 0 from rows of zeros", rest)


def huge_numbers_come_back(subject: Subject) -> None:
    x_TKH = normal(2, 1, 64, seed=3).clamp_(-1, 1) * HUGE
    x_TKH[0, 0, :2] = torch.tensor([HUGE, -HUGE])
    expect_near(subject, x_TKH)


def spoilt_rows_stay_spoilt(subject: Subject) -> None:
    """One NaN or infinity, and no number of the row is finite; its neighbours are as they were."""
    for spoilt in (float("nan"), float("inf"), float("-inf")):
        x_TKH = normal(3, 2, 64, seed=4)
        plain = subject.stands_for(x_TKH)
        x_TKH[1, 0, 17] = spoilt
        found = subject.stands_for(x_TKH)
        num_finite = int(found[1, 0].isfinite().sum())
        expect(num_finite == 0, f"no finite number from a row with {spoilt}", f"{num_finite} of 64")
        found[1, 0] = plain[1, 0]
        expect(torch.equal(found, plain), f"other rows unchanged by one with {spoilt}", "other numbers")


def rows_are_encoded_alone(subject: Subject) -> None:
    """The bits of a token do not depend on what is encoded with it, so chunks of a prompt change nothing."""
    x_TKH = normal(40, 2, 64, seed=5)
    x_TKH[20] *= 1e4
    together = subject.encode(x_TKH)
    for first, last in ((0, 1), (19, 21), (21, 40)):
        alone = subject.encode(x_TKH[first:last])
        same = all(torch.equal(one, other[first:last]) for one, other in zip(alone, together, strict=True))
        expect(same, f"the bits of tokens {first} to {last} encoded alone", "others among 40 tokens")


def rows_are_decoded_in_any_order(subject: Subject) -> None:
    codes, scales = subject.encode(normal(30, 2, 64, seed=6))
    whole = subject.decode((codes, scales))
    some = torch.tensor([29, 0, 7, 7, 3])
    found = subject.decode((codes[some], scales[some]))
    expect(torch.equal(found, whole[some]), "the same numbers from rows in another order", "others")


def no_tokens_are_no_rows(subject: Subject) -> None:
    codes, scales = subject.encode(torch.empty(0, 3, 64))
    found = (len(codes), len(scales), tuple(subject.decode((codes, scales)).shape))
    expect(found == (0, 0, (0, 3, 64)), "no codes, no scales, [0, 3, 64]", found)


def nothing_given_is_changed(subject: Subject) -> None:
    kv_format, x_TKH = subject.build(), normal(9, 2, 64, seed=7).to(subject.device)
    given = x_TKH.clone()
    codes, scales = kv_format.encode(x_TKH)
    expect(torch.equal(x_TKH, given), "keys as they were given", "others after encode")
    before = (codes.clone(), scales.clone())
    kv_format.decode(codes, scales).fill_(1.0)
    same = torch.equal(codes, before[0]) and torch.equal(scales, before[1])
    expect(same, "codes and scales as they were, whatever is written to what decode gave", "others")


def encoding_leaves_no_state(subject: Subject) -> None:
    kv_format, x_TKH = subject.build(), normal(4, 2, 64, seed=8).to(subject.device)
    before = tuple(one.clone() for one in kv_format.encode(x_TKH))
    kv_format.encode(x_TKH * 100)
    same = all(map(torch.equal, kv_format.encode(x_TKH), before))
    expect(same, "the same bits again after other rows were encoded", "others")


def declared_arithmetic_is_its_own(subject: Subject) -> None:
    """Codes and scales to the bit, from float32 divisions and the nearest of all numbers that a code stands for."""
    codes = subject.build().symmetric()
    if codes is None:
        return
    x_TKH = normal(20, 2, 96, seed=9) * torch.logspace(-14, 14, 20)[:, None, None]
    x_TKH[3], x_TKH[4, 0, 5], x_TKH[5, 1, 6] = 0, float("nan"), float("inf")
    x_TKH[6, 0, :6] = torch.tensor([codes.limit, 0.5, 1.5, 2.5, -0.5, -1.5])  # ties, where the scale is 1
    x_TKH[6, 0, 6:] = 0
    found_codes, found_scales = subject.encode(x_TKH)
    expected_codes, expected_scales = nearest_codes(x_TKH, codes)
    same = torch.equal(found_scales.nan_to_num(nan=-1), expected_scales.nan_to_num(nan=-1))
    expect(same, "one float32 scale a row, as symmetric() says", found_scales)
    differ = int((found_codes.view(torch.uint8) != expected_codes.view(torch.uint8)).sum())
    expect(differ == 0, f"codes that are the bits of {codes.value_dtype} as symmetric() says", f"{differ} others")


def nearest_codes(x_TKH: torch.Tensor, codes: SymmetricCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes in value_dtype, scales_TK1) by the definition of SymmetricCodes, with a table of every code."""
    bits = torch.arange(256, dtype=torch.uint8).view(codes.value_dtype)
    numbers, is_number = bits.double(), bits.float().isfinite() & (bits.float().abs() <= codes.limit)
    is_number &= ~((numbers == 0) & torch.signbit(numbers))
    bits, numbers_V = bits.view(torch.uint8)[is_number], numbers[is_number]
    largest_TK1 = x_TKH.abs().amax(-1, keepdim=True)
    limit = torch.tensor(codes.limit)
    scales_TK1 = torch.maximum(largest_TK1 / limit, torch.tensor(codes.least_scale))
    is_sound_TK1 = scales_TK1.isfinite()
    values_TKH = (x_TKH / scales_TK1).where(is_sound_TK1, 0.0).clamp(-codes.limit, codes.limit)
    distance_TKHV = (values_TKH.double().unsqueeze(-1) - numbers_V).abs()
    is_nearest = distance_TKHV == distance_TKHV.amin(-1, keepdim=True)
    is_even = bits % 2 == 0
    chosen_TKH = (is_nearest.int() * (1 + is_even.int())).argmax(-1)
    return bits[chosen_TKH].view(codes.value_dtype), scales_TK1.where(is_sound_TK1, float("nan"))


ALWAYS: tuple[Callable[[Subject], None], ...] = (
    row_describes_memory,
    encodes_what_row_says,
    codes_are_integers,
    odd_head_dims_work_or_are_refused,
    rows_come_back,
    half_types_are_read_exactly,
    decodes_to_float32,
    zeros_stay_zeros,
    huge_numbers_come_back,
    spoilt_rows_stay_spoilt,
    rows_are_encoded_alone,
    rows_are_decoded_in_any_order,
    no_tokens_are_no_rows,
    nothing_given_is_changed,
    encoding_leaves_no_state,
    declared_arithmetic_is_its_own,
)
