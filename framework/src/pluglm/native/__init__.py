"""Kernels for the CPU in C++: built with the machine's compiler at first use, called through plain C functions.

Everything here has a plain torch counterpart elsewhere, which is its reference and runs where this cannot.
"""
