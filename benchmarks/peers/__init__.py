"""Parts of `benchmarks/decode.py`: peers' environments, weights in their formats, workers and bounds."""
