"""KV managers that reuse the blocks of earlier requests for equal prefixes, and what they evict first."""
