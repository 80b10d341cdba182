"""Attention plugins: naive (the reference), flash, paged and sdpa."""
