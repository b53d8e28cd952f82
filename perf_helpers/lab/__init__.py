"""Experiments, each in a clean process of its own: what is trained, how it is measured, and what it yielded.

Covers the machine, tasks and training arguments, the meters, processes, and runs with their store. Not covered: what is
said of a run without running it (`perf_helpers.estimate`) and whether a statement holds (`perf_helpers.course`).
"""

from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.lab import Lab
from perf_helpers.lab.task import PROFILES, Task
from perf_helpers.records import Ratio

__all__ = ["PROFILES", "Arguments", "Lab", "Ratio", "Task"]
