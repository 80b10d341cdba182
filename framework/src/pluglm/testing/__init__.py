"""Contract kits: checks that any implementation of an interface must pass, usable with and without pytest."""
