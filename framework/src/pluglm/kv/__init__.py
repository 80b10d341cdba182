"""KV managers (contiguous, paged) and the tensor store that the real backends share."""
