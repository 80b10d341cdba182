"""Drafters for speculative decoding: ngram, suffix, draft_model, universal."""
