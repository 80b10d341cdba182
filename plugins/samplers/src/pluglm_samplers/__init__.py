"""Samplers, logits steps and a search: one module per step; `chain` runs them, `greedy` and `beam` need none."""
