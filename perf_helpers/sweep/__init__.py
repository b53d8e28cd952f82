"""Sweeping over workers: a grid of training arguments, of which every combination is a training of its own.

Covers the plan and its file, Dask's workers as an executor for any lab, and the sweep that hands them its rows.
Not covered: how one row is measured, and the store that keeps it (`perf_helpers.lab`).
"""

from perf_helpers.sweep.dask_workers import Workers, connected
from perf_helpers.sweep.sweep import Plan, Sweep, run

__all__ = ["Plan", "Sweep", "Workers", "connected", "run"]
