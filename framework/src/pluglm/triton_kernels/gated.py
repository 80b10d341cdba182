"""Launches the gated activations SwiGLU, GeGLU (both forms of GELU) and ReGLU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pluglm.triton_kernels.launching import check_rows, launch, power_of_two, same, warps_for

# T: rows, I: width of the feed-forward layer

# The kernel's form, by the names that config.json uses, as `models.activations`.
GATED_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_MOST_COLUMNS = 2048  # of one program


def column_blocks(num_columns: int) -> tuple[int, int]:
    """BLOCK and num_warps of a launch over columns."""
    block = min(power_of_two(num_columns), _MOST_COLUMNS)
    return block, warps_for(block)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up as out_TI in the dtype of gate_up [T, 2I], gate first; float32 inside, rounded once.

    activation: one of GATED_ACTIVATIONS. ValueError for another one, an odd width, and where kernels cannot run.
    """
    if activation not in GATED_ACTIVATIONS:
        raise ValueError(f"activation '{activation}' has no kernel; there are {sorted(GATED_ACTIVATIONS)}")
    check_rows("gate_up", gate_up, 2)
    num_rows, width = gate_up.shape
    same("the remainder of gate_up's width by 2", width % 2, 0)
    num_columns = width // 2
    block, num_warps = column_blocks(num_columns)
    out_TI = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)

    def kernel() -> None:
        from pluglm.triton_kernels.kernels.gated import gated_kernel

        gated_kernel[(num_rows, -(-num_columns // block))](
            gate_up,
            out_TI,
            gate_up.stride(0),
            num_columns,
            FORM=GATED_ACTIVATIONS[activation],
            BLOCK=block,
            num_warps=num_warps,
        )

    if out_TI.numel():
        launch(kernel, gate_up)
    return out_TI
