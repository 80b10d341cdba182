"""One module a contender, run as `python -m peers.workers.NAME SETUP` in its own environment; pluglm is in one only."""
