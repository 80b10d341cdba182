"""The kit of quantizers is tested: plain rounding to int8 passes, and each check has one that fails only that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.quantizer import quantizer_checks

# R: rows, N: output features, K: input features


class RoundedLinear:
    """q_NK int8 times scale_N1."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self.scale_N1 = weight_NK.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        self.q_NK = (weight_NK / self.scale_N1).round().to(torch.int8)
        self.bias_N = bias_N
        self.num_bytes = self.q_NK.nbytes + self.scale_N1.nbytes + (0 if bias_N is None else bias_N.nbytes)

    def weight(self) -> torch.Tensor:
        return self.q_NK.float() * self.scale_N1

    def __call__(self, x_RK: torch.Tensor) -> torch.Tensor:
        out_RN = x_RK @ self.weight().T
        return out_RN if self.bias_N is None else out_RN + self.bias_N


class RoundingQuantizer:
    interface_version = 1
    Config = ComponentConfig
    Linear: type[RoundedLinear] = RoundedLinear

    def __init__(self, config: ComponentConfig, device: str, dtype: torch.dtype) -> None:
        self.last: RoundedLinear | None = None

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def make_linear(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> RoundedLinear:
        self.last = self.Linear(weight_NK, bias_N)
        return self.last

    def dequantize(self, linear: Any) -> torch.Tensor:
        weight_NK: torch.Tensor = linear.weight()
        return weight_NK


def calls(function: Any) -> type[RoundingQuantizer]:
    """Layers whose output passes through function(linear, x_RK, out_RN)."""

    class Broken(RoundedLinear):
        def __call__(self, x_RK: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(function(self, x_RK, super().__call__(x_RK)))

    return type("BrokenQuantizer", (RoundingQuantizer,), {"Linear": Broken})


def makes(function: Any) -> type[RoundingQuantizer]:
    """Layers that function(linear, weight_NK) changes after they are made."""

    class Broken(RoundedLinear):
        def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
            super().__init__(weight_NK, bias_N)
            function(self, weight_NK)

    return type("BrokenQuantizer", (RoundingQuantizer,), {"Linear": Broken})


class OneScale(RoundedLinear):
    """The scale of the whole tensor where rows differ much in size."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        super().__init__(weight_NK, bias_N)
        if weight_NK.shape == (48, 128):
            self.scale_N1 = self.scale_N1.max().expand(48, 1).clone()
            self.q_NK = (weight_NK / self.scale_N1).round().to(torch.int8)


class HalfWeights(RoundingQuantizer):
    def dequantize(self, linear: Any) -> torch.Tensor:
        weight_NK = super().dequantize(linear)
        return weight_NK.half() if weight_NK.shape == (24, 64) else weight_NK


class ReusesTheBuffer(RoundingQuantizer):
    def make_linear(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> RoundedLinear:
        before, linear = self.last, super().make_linear(name, weight_NK, bias_N)
        if before is not None and before.q_NK.shape == linear.q_NK.shape:
            before.q_NK.copy_(linear.q_NK)
        return linear


def drops_the_last_input(linear: Any, x_RK: torch.Tensor, out_RN: torch.Tensor) -> torch.Tensor:
    return out_RN - x_RK[:, -1:] * linear.weight()[:, -1] if x_RK.shape == (7, 128) else out_RN


def forgets_the_bias(linear: Any, x_RK: torch.Tensor, out_RN: torch.Tensor) -> torch.Tensor:
    return out_RN if linear.bias_N is None else out_RN - linear.bias_N


def pads_odd_inputs_wrongly(linear: Any, x_RK: torch.Tensor, out_RN: torch.Tensor) -> torch.Tensor:
    return out_RN + (x_RK[:, :1] if x_RK.shape[1] % 8 else 0)


def never_quite_zero(linear: Any, x_RK: torch.Tensor, out_RN: torch.Tensor) -> torch.Tensor:
    return out_RN + 1e-7


def pads_the_batch(linear: Any, x_RK: torch.Tensor, out_RN: torch.Tensor) -> torch.Tensor:
    return out_RN if len(x_RK) else out_RN.new_zeros(1, out_RN.shape[1])


def answers_in_double(linear: Any, x_RK: torch.Tensor, out_RN: torch.Tensor) -> torch.Tensor:
    return out_RN.double()


def rounds_by_the_batchs_largest(linear: Any, x_RK: torch.Tensor, out_RN: torch.Tensor) -> torch.Tensor:
    step = x_RK.abs().max() / 127 if len(x_RK) == 40 else None
    return out_RN if step is None else ((x_RK / step).round() * step) @ linear.weight().T


def scales_in_place(linear: Any, x_RK: torch.Tensor, out_RN: torch.Tensor) -> torch.Tensor:
    x_RK.mul_(0.5)
    return out_RN


def keeps_sixteen_bits(linear: Any, weight_NK: torch.Tensor) -> None:
    linear.kept = weight_NK.to(torch.bfloat16)
    linear.num_bytes += linear.kept.nbytes


def hides_the_original(linear: Any, weight_NK: torch.Tensor) -> None:
    linear.kept = [weight_NK]


BROKEN: dict[str, type[RoundingQuantizer]] = {
    "computes_with_its_dequantised_weight": calls(drops_the_last_input),
    "adds_the_bias": calls(forgets_the_bias),
    "odd_shapes_work_or_are_refused": calls(pads_odd_inputs_wrongly),
    "error_is_small_against_the_row": type("OneScaleQuantizer", (RoundingQuantizer,), {"Linear": OneScale}),
    "dequantised_has_the_weights_shape": HalfWeights,
    "zero_rows_give_zero": calls(never_quite_zero),
    "an_empty_batch_gives_no_rows": calls(pads_the_batch),
    "output_has_the_inputs_dtype": calls(answers_in_double),
    "rows_do_not_depend_on_the_batch": calls(rounds_by_the_batchs_largest),
    "inputs_are_not_changed": calls(scales_in_place),
    "layers_do_not_share_state": ReusesTheBuffer,
    "takes_less_than_half_of_float32": makes(keeps_sixteen_bits),
    "num_bytes_counts_what_it_holds": makes(hides_the_original),
}


def test_a_plain_quantizer_passes() -> None:
    report = run_checks(quantizer_checks(RoundingQuantizer))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in quantizer_checks(RoundingQuantizer)} == COMMON | set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_quantizer_fails_exactly_its_check(name: str) -> None:
    report = run_checks(quantizer_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)
