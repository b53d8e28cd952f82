"""Measure experiments in fresh subprocesses: the fork server, the memory and time meters, and `Runner` above them.

Not covered: comparing runs and deciding claims by them (`perf_helpers`).
"""
