"""The engine: measure, estimate, rehearse and advise on the memory and time of one training.

Layers, each using the layers before it: `core` (the description of a training and of the machine), `measure` (in fresh
subprocesses), `estimate`, `rehearsal`, `advise`, `commands`. Not covered: lessons and claims (`perf_helpers`).
"""
