"""Whether triton kernels can run here, and what must not be run in triton's interpreter. Imports it only when asked."""

from __future__ import annotations

import importlib.util

import torch


def not_installed() -> str | None:
    """Why triton cannot be imported, or None."""
    return None if importlib.util.find_spec("triton") is not None else "triton is not installed"


def is_interpreted() -> bool:
    """Kernels run in triton's interpreter, on CPU tensors. Decided when a kernel's module is first imported."""
    if not_installed():
        return False
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return bool(triton.knobs.runtime.interpret)


def unavailable() -> str | None:
    """Why kernels cannot be launched here, or None; cheap, and imports triton only where there is one."""
    if reason := not_installed():
        return reason
    if is_interpreted():
        return None
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return None


def check_dtype(*tensors: torch.Tensor) -> None:
    """ValueError for bfloat16 in the interpreter.

    It keeps bfloat16 values as their bit patterns, so arithmetic on them is silently wrong; only casts are right.
    """
    if is_interpreted() and any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        raise ValueError("triton's interpreter computes bfloat16 wrongly; use float32 or float16 tensors, or a GPU")
