"""Drafters for speculative decoding: ngram and draft_model."""
