"""Scheduling policies: preferences for the kernel's planner, one module per policy."""
