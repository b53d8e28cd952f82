"""Compare course runs: one run with another, or many runs over time.

Covers the differences, whether each is for the worse, and the step times that are measured for this purpose.
Not covered: the verdicts and the report of a single course run (`perf_helpers.course`), and the comparison of two
experiments in one lesson (`Lab.compare`).
"""
