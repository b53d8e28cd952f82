"""Compare course runs: one run with another, or many runs over time.

Covers what changed, whether it is worse, and the steps timed for that. Not covered: what one run of the course decides
and shows (`perf_helpers.course`), and two runs within it (`Lab.compare`).
"""
