"""Attention plugins: naive (the reference) and sdpa."""
