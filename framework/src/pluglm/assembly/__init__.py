"""Start-up: reads a config, finds what its names mean, accepts or refuses the combination, builds the parts."""
