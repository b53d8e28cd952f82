"""Predict peak memory without training: trace a step on fake tensors and count the live bytes.

Covers the CPU, exact to the byte, and CUDA, whose differences from the CPU are modelled. Not covered: time, and
anything that depends on the values of tensors.
"""

from trainmem.estimate.api import estimate, estimates_so_far
from trainmem.estimate.memory_estimate import MemoryEstimate

__all__ = ["MemoryEstimate", "estimate", "estimates_so_far"]
