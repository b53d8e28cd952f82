"""`trainmem.advise`, with the speed ratios that the course has recorded or that the guides publish."""

from perf_helpers.course.published_speedups import published
from trainmem import advise as engine
from trainmem.advise import parallelism, verify
from trainmem.advise.advice import Advice
from trainmem.core.task import Task

__all__ = ["advise", "parallelism", "verify"]


def advise(task: Task, **options) -> Advice:
    """Return the recipes that fit into a given memory: `trainmem.advise.advise` with the course's speed ratios.

    `options`: the other arguments of `trainmem.advise.advise`, except `published`. The errors are the same as there.
    """
    return engine.advise(task, published=published, **options)
