"""Triton's fused layers: what is refused, what the CUDA backend chooses, and the cases for triton's interpreter.

Triton decides at the import of a kernel whether it is interpreted, so those cases run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pluglm.backends import triton_choice
from pluglm.backends.linear import DenseLinear
from pluglm.backends.triton_choice import choose_fuser, why_not_triton
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.kernels import KernelChoice, KernelLog
from pluglm.kernel.interfaces.model import LayerParts, LayerSpec
from pluglm.models.activations import ACTIVATIONS
from pluglm.triton_kernels.fuser import TritonFuser
from pluglm.triton_kernels.gated import GATED_ACTIVATIONS
from pluglm.triton_kernels.launching import MOST_FEATURES

HERE = Path(__file__).parent
FOLDER = HERE / "triton_interpreted"
BENCHMARKS = HERE.parents[1] / "benchmarks"
HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_in_interpreter() -> None:
    files = sorted(str(file) for file in FOLDER.glob("*_cases.py"))
    assert [Path(file).stem for file in files] == [f"triton_{name}_cases" for name in ("layer", "measure", "model")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join((str(FOLDER), str(HERE), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, env=environment, cwd=FOLDER, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def parts(width: int = 8, inner: int = 12) -> LayerParts:
    linear = [DenseLinear("w", torch.ones(1, 1), None)] * 4
    return LayerParts(
        spec=LayerSpec(index=0, num_heads=2, num_kv_heads=1, head_dim=4, scale=1.0),
        activation="silu",
        eps=1e-5,
        attention_norm=torch.ones(width),
        mlp_norm=torch.ones(width),
        **dict(zip(("qkv", "output", "gate_up", "down"), linear, strict=True)),
    )


def changed(**changes: Any) -> LayerParts:
    spec = {key: changes.pop(key) for key in ("head_dim",) if key in changes}
    whole = replace(parts(), **changes)
    return replace(whole, spec=replace(whole.spec, **spec))


WIDE = torch.ones(MOST_FEATURES + 1)
TOO_WIDE = "its rows have 16385 features, and a program holds 16384"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"activation": "mish"}, "activation mish has no kernel"),
    "odd head dim": ({"head_dim": 5}, "its head dim is odd"),
    "wide heads": ({"head_dim": 4098}, "its head dim is 4098, and a program holds 4096"),
    "wide rows": (
        {"attention_norm": WIDE, "mlp_norm": WIDE},
        "its rows have 16385 features, and a program holds 16384",
    ),
    "norm": ({"mlp_norm": torch.ones(7)}, r"its mlp_norm is [7], not [8]"),
    "out norm": ({"attention_out_norm": torch.ones(8, 1)}, r"its attention_out_norm is [8, 1], not [8]"),
    "heads": ({"head_norm": torch.ones(2, 4)}, r"its head_norm is [2, 4], not [3, 4]"),
    "dimensions": ({"attention_norm": torch.ones(8, 1)}, r"its norm is [8, 1], not a row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fused_is_recorded_with_its_reason(name: str) -> None:
    changes, reason = REFUSED[name]
    log = KernelLog()
    assert TritonFuser("cpu", log).layer(changed(**changes)) is None
    assert log.choices == [KernelChoice("decoder layer", "torch", (("triton", reason),))]


def test_a_head_that_is_too_wide_is_recorded_and_others_are_fused() -> None:
    log = KernelLog()
    fuser = TritonFuser("cpu", log)
    assert fuser.head(WIDE, 1e-5, WIDE[None]) is None
    assert fuser.head(torch.ones(8), 1e-5, torch.ones(3, 8)) is not None
    assert fuser.layer(parts()) is not None
    assert log.choices == [
        KernelChoice("head", "torch", (("triton", TOO_WIDE),)),
        KernelChoice("head", "triton"),
        KernelChoice("decoder layer", "triton"),
    ]


def test_weights_stay_where_they_are() -> None:
    fuser, tensor = TritonFuser("cpu", KernelLog()), torch.ones(2)
    assert fuser.placed(tensor) is tensor
    assert fuser.placed_bytes(12) == 12
    empty = fuser.empty((2, 3), torch.float16)
    assert (tuple(empty.shape), empty.dtype, empty.device.type) == ((2, 3), torch.float16, "cpu")


def test_every_activation_of_the_models_has_a_kernel() -> None:
    assert set(GATED_ACTIVATIONS) == set(ACTIVATIONS)


def recorded(reason: str) -> list[KernelChoice]:
    return [KernelChoice(operation, "torch", (("triton", reason),)) for operation in ("decoder layer", "head")]


def test_a_run_without_triton_goes_on_with_torch_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    log = KernelLog()
    assert choose_fuser("auto", "cuda:0", log) is None
    assert log.choices == recorded("triton is not installed")
    message = "backend 'cuda': kernels: triton cannot be had here: triton is not installed; set backend.kernels: auto"
    with pytest.raises(PluginError, match=re.escape(message)):
        choose_fuser("triton", "cuda:0", log)


def test_kernels_that_do_not_start_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton compiles its launcher at the first launch; without a compiler it raises RuntimeError."""

    def fails(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(triton_choice, "unavailable", lambda: None)
    monkeypatch.setattr(triton_choice, "gather_rows", fails)
    log = KernelLog()
    assert choose_fuser("auto", "cpu", log) is None
    assert log.choices == recorded("a first launch failed: RuntimeError: Failed to find C compiler.")


def test_a_launch_that_works_is_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[torch.Size] = []
    monkeypatch.setattr(triton_choice, "unavailable", lambda: None)
    monkeypatch.setattr(triton_choice, "gather_rows", lambda x_TD, rows_R: launched.append(x_TD.shape))
    log = KernelLog()
    for kernels in ("auto", "triton"):
        assert isinstance(choose_fuser(kernels, "cpu", log), TritonFuser)  # type: ignore[arg-type]
    assert log.choices == []  # layers and heads say for themselves what they are
    assert len(launched) == 2
    assert why_not_triton("cpu") is None


def test_torch_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_choice, "why_not_triton", lambda device: pytest.fail("nobody asked"))
    log = KernelLog()
    assert choose_fuser("torch", "cpu", log) is None
    assert log.choices == recorded("the config says kernels: torch")
