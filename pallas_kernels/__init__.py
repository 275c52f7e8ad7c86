"""Kernels: they import jax and nothing of the library that uses them."""
