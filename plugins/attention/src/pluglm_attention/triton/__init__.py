"""Attention in Triton for CUDA. Imports no triton; the modules `launch` and `launch_scatter` do."""

from pluglm.triton_kernels.availability import unavailable

__all__ = ["unavailable"]
