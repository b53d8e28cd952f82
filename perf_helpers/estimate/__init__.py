"""Peak memory predicted without training: the step is followed on fake tensors, and its live bytes are counted.

Covers the CPU to the byte, CUDA as its differences are modelled, and surfaces over micro-batch and length for the
explorers. Not covered: time, and whatever depends on the values of tensors.
"""

from perf_helpers.estimate.estimates import MemoryEstimate, estimate, estimates_so_far

__all__ = ["MemoryEstimate", "estimate", "estimates_so_far"]
