"""Samplers and logits steps: one module per step; `chain` runs them, `greedy` needs none."""
