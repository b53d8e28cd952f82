"""The widgets of a lesson: guesses, questions, exercises, explorers and the monitor.

Each is a thin layer over plain functions. Not covered: static pictures (`perf_helpers.plots`), and the journal that
keeps the answers (`perf_helpers.course.learner_log`).
"""

from perf_helpers.widgets.exercises import progress
from perf_helpers.widgets.explorers import explore
from perf_helpers.widgets.guesses import predict, revealed

__all__ = ["explore", "predict", "progress", "revealed"]
