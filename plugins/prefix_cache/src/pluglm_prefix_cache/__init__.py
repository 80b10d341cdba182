"""KV managers that reuse the blocks of earlier requests for equal prefixes, what they evict first, where it goes."""
