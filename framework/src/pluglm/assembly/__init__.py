"""Start-up: reads a config, resolves its names, accepts or refuses the combination, builds the engine's parts."""
