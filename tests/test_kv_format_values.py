"""Every attention with every KV format against float64: within its own bound of what the codes stand for, and within
a bound that follows from the scales of what was encoded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pluglm.assembly.registry import find, list_entries, load
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.testing.attention_cases import Case, batch_of, make_case, new_rows, reference
from pluglm.testing.attention_formats import decoded, encoded_store
from pluglm.testing.context import make_context, small_spec

FORMATS = sorted(entry.name for entry in list_entries("kv_format"))
KINDS = [
    ("naive", {}),
    ("sdpa", {}),
    *((name, {"kernel": kernel}) for name in ("flash", "paged") for kernel in ("tiled", "torch")),
]
LENGTHS = [(37, 1), (0, 21), (300, 2), (9, 12), (5, 1)]  # decode, a prompt, a draft behind several pieces, a chunk
LAYER = LayerSpec(index=0, num_heads=4, num_kv_heads=2, head_dim=32, scale=32**-0.5)


def made_format(name: str) -> Any:
    return load(find(("kv_format",), name))(ComponentConfig(), "cpu", torch.float32)


def run(name: str, options: dict[str, str], case: Case, kv_format: Any, dtype: str) -> tuple[torch.Tensor, Any]:
    """(out_TNH, the class of the attention)."""
    cls = load(find(("attention",), name))
    layers = (case.layer, replace(case.layer, index=1))
    spec = replace(small_spec(), layers=layers)
    attention = cls(cls.Config(**options), make_context(spec=spec, dtype=dtype, kv_format=kv_format, max_model_len=512))
    store = encoded_store(case, kv_format, "cpu")
    with torch.inference_mode():
        plan = attention.plan(batch_of(case, "cpu"))
        return attention.run(case.layer, *new_rows(case, "cpu"), plan, store), cls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layer", [LAYER, replace(LAYER, window=20)], ids=["all", "window"])
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("attention", "options"), KINDS, ids=str)
def test_within_the_bound_of_what_codes_stand_for(
    attention: str, options: dict[str, str], kv_format: str, layer: LayerSpec, dtype: str
) -> None:
    used = made_format(kv_format)
    for block_size, is_shuffled in ((16, True), (64, False)):
        case = make_case(layer, LENGTHS, block_size=block_size, shuffled=is_shuffled, dtype=getattr(torch, dtype))
        found, cls = run(attention, options, case, used, dtype)
        assert found.dtype == getattr(torch, dtype)
        error = (found.double() - reference(decoded(case, used))).abs().max()
        assert float(error) <= cls.ERROR_BOUNDS[dtype]


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("attention", "options"), KINDS, ids=str)
def test_within_the_bound_of_the_scales(attention: str, options: dict[str, str], kv_format: str) -> None:
    """A key that is off by d moves a score by e <= scale * sum |q| d, and a weight by a factor of exp(2 e) at most.

    So a result is off by (exp(2 e) - 1) max |v| + what a value is off by. d: half a scale of int8; of fp8 a sixteenth
    of the number or 2**-10 scales.
    """
    used = made_format(kv_format)
    case = make_case(LAYER, LENGTHS)
    found, cls = run(attention, options, case, used, "float32")
    off, row = 0.0, 0
    for text, (cached, new) in zip(case.texts, case.lengths, strict=True):
        k_off, v_off = (_off_by(x, kv_format) for x in (text.k_SKH, text.v_SKH))
        for position in range(cached, cached + new):
            q_KGH = text.q_SNH[position].double().view(2, 2, -1).abs()
            e = float(torch.einsum("kgh,skh->skg", q_KGH, k_off[: position + 1]).max()) * LAYER.scale
            largest = float(text.v_SKH[: position + 1].abs().max())
            allowed = (2.718281828459045 ** (2 * e) - 1) * largest + float(v_off[: position + 1].max())
            exact = reference(case)[row]
            error = float((found[row].double() - exact).abs().max())
            assert error <= allowed + cls.ERROR_BOUNDS["float32"]
            off, row = max(off, error), row + 1
    assert off > 1e-4  # the codes were read, not the numbers


def _off_by(x_SKH: torch.Tensor, kv_format: str) -> torch.Tensor:
    largest = x_SKH.double().abs().amax(-1, keepdim=True)
    if kv_format == "int8":
        return (largest / 254 * 1.0001).expand_as(x_SKH)
    return torch.maximum(x_SKH.double().abs() / 16, largest / 448 * 2**-10) * 1.0001


def test_the_formats_of_this_file_are_those_installed() -> None:
    assert FORMATS == ["fp8", "int8"]
