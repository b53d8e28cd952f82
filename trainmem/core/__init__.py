"""The description of a training: task, arguments, adapters, experiment, and the machine with its packages.

Not covered: running it (`trainmem.measure`).
"""
