"""The contract kit of quantizers: a layer computes what its dequantised weight says, near the weight it was given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pluglm.kernel.errors import CheckpointError
from pluglm.kernel.interfaces.model import Linear
from pluglm.kernel.interfaces.quantizer import Quantizer
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.common import common_checks

# R: rows, N: output features, K: input features

NAME = "model.layers.0.mlp.up_proj.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The class under test. max_error: largest weight error as a share of the row's largest weight."""

    cls: type[Any]
    config: Any
    device: str
    max_error: float

    def build(self) -> Quantizer:
        quantizer: Quantizer = self.cls(self.config, self.device, torch.float32)
        return quantizer

    def make(self, quantizer: Quantizer, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> Linear:
        """A layer from copies, as the layer owns what it is given."""
        bias = None if bias_N is None else bias_N.clone().to(self.device)
        return quantizer.make_linear(NAME, weight_NK.clone().to(self.device), bias)

    def call(self, linear: Linear, x_RK: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return linear(x_RK.clone().to(self.device)).cpu()


def quantizer_checks(
    cls: type[Any], config: Any = None, *, device: str = "cpu", max_error: float = 0.15
) -> Iterator[Check]:
    """Every check of a quantizer class."""
    config = cls.Config() if config is None else config
    subject = Subject(cls=cls, config=config, device=device, max_error=max_error)
    yield from common_checks("quantizer", cls, config, subject.build)
    for function in ALWAYS:
        yield make_check(function, subject)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expect_product(subject: Subject, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, x_RK: torch.Tensor) -> None:
    """The layer against x @ dequantised.T + bias in float64, within float32 rounding of the sums."""
    quantizer = subject.build()
    linear = subject.make(quantizer, weight_NK, bias_N)
    plain_NK = quantizer.dequantize(linear).cpu().double()
    expected = x_RK.double() @ plain_NK.T + (0 if bias_N is None else bias_N.double())
    size = x_RK.double().abs() @ plain_NK.abs().T + 1
    worst = float(((subject.call(linear, x_RK).double() - expected).abs() / size).max())
    expect(worst <= 1e-5, "x @ dequantised.T + bias within 1e-5 of the sum of sizes", f"{worst:.3g}")


def computes_with_its_dequantised_weight(subject: Subject) -> None:
    expect_product(subject, normal(64, 128), None, normal(7, 128, seed=1))


def adds_the_bias(subject: Subject) -> None:
    expect_product(subject, normal(32, 64), normal(32, seed=2) * 3, normal(3, 64, seed=1))


def odd_shapes_work_or_are_refused(subject: Subject) -> None:
    for num_out, num_in in ((37, 53), (1, 130), (65, 1)):
        try:
            expect_product(subject, normal(num_out, num_in), None, normal(2, num_in, seed=1))
        except CheckpointError as error:
            expect(NAME in str(error), f"a refusal that names {NAME}", error)


def error_is_small_against_the_row(subject: Subject) -> None:
    """Rows of very different sizes: each one is close relative to itself."""
    weight_NK = normal(48, 128) * torch.logspace(-3, 2, 48)[:, None]
    quantizer = subject.build()
    error_NK = quantizer.dequantize(subject.make(quantizer, weight_NK)).cpu() - weight_NK
    worst = float((error_NK.abs().max(1).values / weight_NK.abs().max(1).values).max())
    expect(worst <= subject.max_error, f"weights within {subject.max_error} of their row's largest", f"{worst:.3g}")


def dequantised_has_the_weights_shape(subject: Subject) -> None:
    quantizer = subject.build()
    found = quantizer.dequantize(subject.make(quantizer, normal(24, 64)))
    expect((found.shape, found.dtype) == ((24, 64), torch.float32), "float32 [24, 64]", (found.shape, found.dtype))


def zero_rows_give_zero(subject: Subject) -> None:
    weight_NK = normal(16, 64)
    weight_NK[3:6] = 0
    found = subject.call(subject.make(subject.build(), weight_NK), normal(5, 64, seed=1))
    expect(bool((found[:, 3:6] == 0).all()), "exactly 0 from weight rows of zeros", found[:, 3:6])


def an_empty_batch_gives_no_rows(subject: Subject) -> None:
    found = subject.call(subject.make(subject.build(), normal(16, 64)), torch.empty(0, 64))
    expect(found.shape == (0, 16), "shape (0, 16)", tuple(found.shape))


def output_has_the_inputs_dtype(subject: Subject) -> None:
    found = subject.call(subject.make(subject.build(), normal(16, 64), normal(16)), normal(4, 64, seed=1))
    expect((found.shape, found.dtype) == ((4, 16), torch.float32), "float32 [4, 16]", (found.shape, found.dtype))


def rows_do_not_depend_on_the_batch(subject: Subject) -> None:
    """Up to the rounding of sums: a row alone and among 39 others, one of them huge."""
    linear, x_RK = subject.make(subject.build(), normal(32, 64)), normal(40, 64, seed=1)
    x_RK[20] *= 1e4
    together = subject.call(linear, x_RK)
    for row in (0, 19, 39):
        error = float((subject.call(linear, x_RK[row : row + 1])[0] - together[row]).abs().max())
        expect(error <= 1e-4, f"row {row} alone as in the batch within 1e-4", f"{error:.3g}")


def inputs_are_not_changed(subject: Subject) -> None:
    linear, x_RK = subject.make(subject.build(), normal(16, 64), normal(16)), normal(4, 64, seed=1).to(subject.device)
    with torch.inference_mode():
        linear(x_RK)
    expect(torch.equal(x_RK.cpu(), normal(4, 64, seed=1)), "x as it was given", "other values")


def layers_do_not_share_state(subject: Subject) -> None:
    quantizer, x_RK = subject.build(), normal(4, 64, seed=1)
    first = subject.make(quantizer, normal(16, 64))
    before = subject.call(first, x_RK)
    subject.make(quantizer, normal(16, 64, seed=3) * 10)
    expect(torch.equal(subject.call(first, x_RK), before), "a layer unchanged by the next one", "another output")


def takes_less_than_half_of_float32(subject: Subject) -> None:
    num_bytes = subject.make(subject.build(), normal(256, 256)).num_bytes
    expect(0 < num_bytes < 256 * 256 * 2, "num_bytes under half of the float32 weight's 262144", num_bytes)


def num_bytes_counts_what_it_holds(subject: Subject) -> None:
    """Every tensor that the layer's attributes reach, each storage once; nothing at full precision hides."""
    linear = subject.make(subject.build(), normal(256, 256), normal(256))
    held = sum(_storages(linear, depth=3).values())
    expect(held <= linear.num_bytes * 1.02 + 256, f"at most num_bytes = {linear.num_bytes} held", held)


def _storages(value: Any, depth: int) -> dict[int, int]:
    """Storage address -> bytes."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
        parts = [getattr(value, name, None) for name in names] if depth else []
    found: dict[int, int] = {}
    for part in parts:
        found |= _storages(part, depth - 1) if depth else {}
    return found


ALWAYS = (
    computes_with_its_dequantised_weight,
    adds_the_bias,
    odd_shapes_work_or_are_refused,
    error_is_small_against_the_row,
    dequantised_has_the_weights_shape,
    zero_rows_give_zero,
    an_empty_batch_gives_no_rows,
    output_has_the_inputs_dtype,
    rows_do_not_depend_on_the_batch,
    inputs_are_not_changed,
    layers_do_not_share_state,
    takes_less_than_half_of_float32,
    num_bytes_counts_what_it_holds,
)
