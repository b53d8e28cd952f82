"""The training arguments that fit a memory, the fastest first, and why not the others.

Covers the search over recipes, the speeds that somebody measured, and what would help where nothing fits. Not covered:
how the memory of one recipe is predicted (`perf_helpers.estimate`).
"""

from perf_helpers.advise.advice import advise, verify

__all__ = ["advise", "verify"]
