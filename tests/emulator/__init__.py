"""Runs the shipped AMD code objects on a CPU, instruction by instruction, on memory that it checks.

The decoder is tinygrad's. What an instruction does is said here: ``scalar``, ``vector`` and ``memory`` turn a decoded
instruction into a function on a wave (``state``), ``wave`` strings them together, ``device`` makes the fake HIP use it.
"""
