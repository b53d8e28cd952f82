"""What a learner clicks on: guesses, questions, exercises, explorers and the monitor, each thin over plain functions.

Covers what is shown in a notebook and what a learner answers. Not covered: pictures that only show
(`perf_helpers.plots`) and what is kept of the answers (`perf_helpers.course.learner_log`).
"""

from perf_helpers.widgets.exercises import progress
from perf_helpers.widgets.explorers import explore
from perf_helpers.widgets.guesses import predict, revealed

__all__ = ["explore", "predict", "progress", "revealed"]
