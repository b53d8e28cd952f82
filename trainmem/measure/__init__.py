"""Measure experiments in fresh subprocesses: the fork server, the memory and time meters, and `Runner` above them."""
