"""The key `fast` of a chain: how a config file sets it, what `true` refuses, what the log of kernels says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from sampler_cases import context, row

from pluglm import RunConfig
from pluglm.kernel.errors import ConfigError
from pluglm.kernel.interfaces.kernels import KernelChoice
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import SHORT
from pluglm_samplers.chain import ChainConfig, ChainSampler
from pluglm_samplers.fused import MOST_KEPT
from pluglm_samplers.triton.launch import MOST_COLUMNS

SIZE = 2 * SHORT
KERNEL_STEPS = "top_k, top_p, min_p"


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if it was installed."""
    monkeypatch.setattr("pluglm_samplers.device_cut.not_installed", lambda: None)
    return monkeypatch


def made(vocab_size: int = SIZE, device: str = "cpu", **config: Any) -> ChainSampler:
    return logged(vocab_size, device, **config)[0]


def logged(vocab_size: int, device: str, **config: Any) -> tuple[ChainSampler, list[KernelChoice]]:
    known = context(vocab_size)
    known.device = device
    return ChainSampler(ChainConfig.model_validate({"fast": True, **config}), known), known.kernels.choices


@pytest.mark.parametrize(
    ("written", "expected"),
    [("auto", "auto"), ("true", True), ("false", False), ("on", True), ("off", False)],  # YAML 1.1 reads on as true
)
def test_every_value_can_be_written_in_yaml(written: str, expected: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: nowhere}}\nsampler: {{use: chain, fast: {written}}}\n")
    assert ChainConfig.model_validate(RunConfig.from_file(file).sampler.options).fast == expected


def test_other_values_are_refused() -> None:
    with pytest.raises(ValidationError, match="auto"):
        ChainConfig.model_validate({"fast": "always"})


def test_true_refuses_a_run_without_a_fast_path(triton: pytest.MonkeyPatch) -> None:
    for refused, reason in (
        ({"steps": ["logit_bias", "dry"]}, "none of sampler.steps looks at logits alone"),
        ({"vocab_size": SHORT}, "rows have 1024 logits"),
        ({"device": "meta"}, "rows are on meta"),
        ({"device": "cuda", "steps": ["temperature"]}, f"none of sampler.steps is one of {KERNEL_STEPS}"),
        ({"device": "cuda", "vocab_size": MOST_COLUMNS + 1}, "rows have 262145 logits; the kernel takes 262144"),
    ):
        with pytest.raises(ConfigError, match=rf"^sampler\.fast: true cannot be had: {reason}"):
            made(**refused)  # type: ignore[arg-type]
        for fast in ("auto", False):
            made(**{**refused, "fast": fast})  # type: ignore[arg-type]
    for had in ({"vocab_size": SHORT + 1}, {"device": "cuda", "vocab_size": MOST_COLUMNS}):
        made(**had)  # type: ignore[arg-type]


def test_true_refuses_requests_without_a_fast_path(triton: pytest.MonkeyPatch) -> None:
    on_host, on_cuda = made(), made(device="cuda")
    few, nucleus = SamplingParams(top_k=MOST_KEPT, repetition_penalty=1.1), SamplingParams(top_p=0.9)
    for sampler in (on_host, on_cuda):
        assert sampler.check(few) is None
        assert sampler.check(SamplingParams(temperature=0.0)) is None
    assert on_cuda.check(nucleus) is None
    assert KERNEL_STEPS in (on_cuda.check(SamplingParams(temperature=0.7)) or "")
    for params in (nucleus, SamplingParams(top_k=MOST_KEPT + 1)):
        assert "top_k of at most 512" in (on_host.check(params) or ""), params
        assert made(fast="auto").check(params) is None


def test_many_ties_go_by_id_with_true_too() -> None:
    """By hand: of equal logits the lowest ids stay, so with a top_k of 1 token 0 is drawn."""
    rows = [row(SamplingParams(top_k=1), seed=seed) for seed in range(2)]
    assert made().sample(torch.zeros(2, SIZE), rows) == [0, 0]


def test_the_log_says_what_truncates_on_cuda(triton: pytest.MonkeyPatch) -> None:
    too_wide = f"rows have {MOST_COLUMNS + 1} logits; the kernel takes {MOST_COLUMNS}"
    for vocab_size, expected in (
        (SIZE, KernelChoice("truncation", "triton")),
        (MOST_COLUMNS + 1, KernelChoice("truncation", "torch", (("triton", too_wide),))),
    ):
        assert logged(vocab_size, "cuda", fast="auto")[1] == [expected]
    triton.setattr("pluglm_samplers.device_cut.not_installed", lambda: "triton is not installed")
    missing = KernelChoice("truncation", "torch", (("triton", "triton is not installed"),))
    assert logged(SIZE, "cuda", fast="auto")[1] == [missing]
    for silent in ({"fast": False}, {"fast": "auto", "steps": ["temperature"]}):
        assert logged(SIZE, "cuda", **silent)[1] == []
    assert logged(SIZE, "cpu")[1] == []
