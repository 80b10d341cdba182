"""Constrained decoding through llguidance."""
