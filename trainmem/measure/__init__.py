"""Measure experiments in fresh subprocesses: the fork server, memory and time meters, and `Runner`, which uses them.

Not covered: comparing runs, and deciding by their results whether the course's claims hold (`perf_helpers`).
"""
