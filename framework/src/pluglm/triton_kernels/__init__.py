"""Triton kernels of the framework. Importing this package imports no triton; launching a kernel does."""
