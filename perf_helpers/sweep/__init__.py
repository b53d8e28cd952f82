"""Run a training for every combination of a grid of arguments, on one or several workers.

Covers the plan and its file; the sweep, which runs each row of a plan; and Dask workers, which any lab can use.
Not covered: how one row is measured and stored (`perf_helpers.lab`).
"""

from perf_helpers.sweep.dask_workers import Workers, connected
from perf_helpers.sweep.sweep import Plan, Sweep, run

__all__ = ["Plan", "Sweep", "Workers", "connected", "run"]
