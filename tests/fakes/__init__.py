"""Fake drivers: a libcuda and a libamdhip64 without a GPU, built from C, and the Python that controls them."""
