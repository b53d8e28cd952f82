"""Find the training arguments that fit a memory, the fastest first, and the parallelism for several cards.

Covers the search over recipes, measured speeds, changes that help if nothing fits, and the choice of how to divide a
model among several cards. A recipe is a combination of techniques, each with its training arguments. Not covered: how
the memory of one recipe is predicted (`trainmem.estimate`).
"""

from trainmem.advise.advice import advise, verify
from trainmem.advise.parallel_layouts import parallelism

__all__ = ["advise", "parallelism", "verify"]
