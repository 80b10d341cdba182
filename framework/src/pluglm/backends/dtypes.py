"""From the name of a dtype in a config to the torch dtype. Knows the dtypes that a model can be run in."""

from __future__ import annotations

import torch

from pluglm.kernel.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str, backend: str) -> torch.dtype:
    """Raises ConfigError, naming the backend and the allowed names, for any other one."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ConfigError(f"backend '{backend}' cannot run dtype '{name}'; use one of {', '.join(_DTYPES)}") from None
