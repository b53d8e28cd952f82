"""The lab of a lesson (`Lab`): run and compare experiments, check the machine, measure rooflines, simulate slow links.

Not covered: how an experiment is measured (`trainmem.measure`), how its memory is predicted without running it
(`trainmem.estimate`), and whether a claim holds (`perf_helpers.course`).
"""

from perf_helpers.lab.lab import Lab
from trainmem.core.arguments import Arguments
from trainmem.core.task import PROFILES, Task
from trainmem.records import Ratio

__all__ = ["PROFILES", "Arguments", "Lab", "Ratio", "Task"]
