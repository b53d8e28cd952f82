"""The training arguments that fit a memory, the fastest first, and why not the others; the parallelism for many cards.

Covers the search over recipes, the speeds that somebody measured, what would help where nothing fits, and the decision
tree over layouts of a model on several cards. Not covered: how the memory of one recipe is predicted
(`perf_helpers.estimate`).
"""

from perf_helpers.advise.advice import advise, verify
from perf_helpers.advise.decision_tree import parallelism

__all__ = ["advise", "parallelism", "verify"]
