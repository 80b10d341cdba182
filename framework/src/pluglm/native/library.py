"""The C functions of the built library, with their argument types. Knows no tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

from pluglm.native.build import NativeBuildError

_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_NO_ROW = 2  # as in src/tools.h


def _require_memory(status: int) -> None:
    if status:
        raise MemoryError("the native kernels found no memory for their intermediate results")


def _require_rows(status: int) -> None:
    if status == _NO_ROW:
        raise IndexError("a token id or a position is not among the rows of its table")
    _require_memory(status)


# name -> (result, arguments), as src/api.cpp and src/memory.cpp declare them
FUNCTIONS: Mapping[str, tuple[type | Callable[[int], None] | None, tuple[type, ...]]] = {
    "pluglm_open": (_POINTER, (_INT32, _INT32)),
    "pluglm_close": (None, (_POINTER,)),
    "pluglm_allow_tiles": (_INT32, ()),
    "pluglm_map": (_POINTER, (ctypes.c_size_t,)),
    "pluglm_unmap": (None, (_POINTER, ctypes.c_size_t)),
    "pluglm_read": (ctypes.c_uint64, (_POINTER, _POINTER, ctypes.c_size_t, _INT32)),
    "pluglm_linear": (_require_memory, (_POINTER, _INT32, _POINTER, _POINTER, _INT64, _INT32, _POINTER)),
    "pluglm_norm": (_require_memory, (_POINTER, _INT32, _POINTER, _POINTER, _FLOAT, _INT64, _INT64, _POINTER)),
    "pluglm_head": (_require_memory, (_POINTER, _INT32, _POINTER, _POINTER, _FLOAT, _POINTER, _INT64, _POINTER)),
    "pluglm_add_and_norm": (
        _require_memory,
        (_POINTER, _INT32, *(_POINTER,) * 4, _FLOAT, _INT64, _INT64, _POINTER, _POINTER),
    ),
    "pluglm_turn_heads": (
        _require_memory,
        (_POINTER, _INT32, _POINTER, _POINTER, _POINTER, _POINTER, _INT64, _POINTER),
    ),
    "pluglm_gated": (_require_memory, (_POINTER, _INT32, _INT32, _POINTER, _INT64, _INT64, _POINTER)),
    "pluglm_panels_fit": (_INT32, (_POINTER,)),
    "pluglm_pack_weight": (_require_memory, (_POINTER, _POINTER, _INT64, _INT64)),
    "pluglm_packed_rows": (_require_rows, (_POINTER, _POINTER, _POINTER, _INT64, _POINTER)),
    "pluglm_pre_attention": (
        _require_memory,
        (_POINTER, _INT32, _POINTER, _POINTER, _POINTER, _POINTER, _INT64, _POINTER),
    ),
    "pluglm_post_attention": (_require_memory, (_POINTER, _INT32, _POINTER, _POINTER, _POINTER, _INT64, _POINTER)),
    "pluglm_stack": (_require_rows, (_POINTER, _INT32, _POINTER)),
    "pluglm_attention": (_require_memory, (_POINTER, _INT32, _POINTER)),
}


class LinearStruct(ctypes.Structure):
    """struct Linear of src/linear.h."""

    _fields_ = (
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("outputs", _INT64),
        ("inputs", _INT64),
        ("is_packed", _INT64),
    )


class LayerStruct(ctypes.Structure):
    """struct Layer of src/layer.h."""

    _fields_ = (
        ("activation", _INT32),
        ("eps", _FLOAT),
        ("heads", _INT64),
        ("kv_heads", _INT64),
        ("head_dim", _INT64),
        *(
            (name, _POINTER)
            for name in ("attention_norm", "head_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
        ),
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
    )


def load_library(path: Path) -> ctypes.CDLL:
    """The library with every function typed. NativeBuildError when the system does not load it."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NativeBuildError(f"{path} does not load: {' '.join(str(error).split())}") from error
    return library
