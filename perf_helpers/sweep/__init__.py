"""Run a training for every combination of a grid of arguments, on one or several workers.

A `Plan` lists the trainings, one per row; a TOML file may hold it. `run` runs each row and returns a `Sweep`. Any lab
can use the Dask workers (`Workers`). Not covered: how one row is measured and stored (`perf_helpers.lab`).
"""

from perf_helpers.sweep.dask_workers import Workers, connected
from perf_helpers.sweep.sweep import Plan, Sweep, run

__all__ = ["Plan", "Sweep", "Workers", "connected", "run"]
