"""Experiments with a run: workloads, simulation on a virtual clock, measured runs and the step times fitted to them."""
