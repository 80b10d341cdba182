"""The minimal kernel: nouns, contracts, config, registry, hooks and the engine loop. It imports no plugin."""
