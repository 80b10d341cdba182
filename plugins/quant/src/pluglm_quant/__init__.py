"""Weight quantizers that work while a model loads: int8 per channel and int4 in groups."""
