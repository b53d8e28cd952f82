"""The engine: what one training takes in memory and time, measured, estimated, rehearsed or advised.

Layers, each using those before it: `core` (what is trained, and on what machine), `measure` (in fresh subprocesses),
`estimate`, `rehearsal`, `advise`, `commands`. Not covered: lessons and claims (`perf_helpers`).
"""
