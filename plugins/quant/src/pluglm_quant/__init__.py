"""Quantisation on the fly: weights in int8 and int4 while a model loads, keys and values in int8 and fp8 later."""
