"""Triton kernels of the samplers. Importing this package imports no triton; its other modules do."""
