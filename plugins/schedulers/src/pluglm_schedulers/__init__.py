"""Schedulers: preferences for the kernel's planner, one module per policy, and a planner of their own kind."""
