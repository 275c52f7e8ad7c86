"""Experiments on top of the library: imports everything, is imported by nothing, and runs from the checkout."""
