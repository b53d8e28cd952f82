"""Predict peak memory without training: trace a step on fake tensors and count the live bytes.

Covers the CPU to the byte, CUDA with its differences modelled, and the peak as a function of micro-batch and sequence
length, for the explorers. Not covered: time, and anything that depends on the values of tensors.
"""

from perf_helpers.estimate.estimates import MemoryEstimate, estimate, estimates_so_far

__all__ = ["MemoryEstimate", "estimate", "estimates_so_far"]
