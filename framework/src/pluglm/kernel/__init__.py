"""The minimal kernel: nouns, contracts, hooks, planner and the engine loop. It imports no plugin."""
