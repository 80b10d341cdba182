"""Backends that come with the framework: cpu (the reference), cuda, and fake (no weights, virtual clock)."""
