"""What is trained, and where: tasks, training arguments, adapters, experiments, and the machine with its packages.

Not covered: running any of it (`trainmem.measure`).
"""
