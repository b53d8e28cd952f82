"""For every test module: figures need no screen."""

import matplotlib

matplotlib.use("Agg")  # here only: a kernel that inherited MPLBACKEND would show no pictures in the lessons
