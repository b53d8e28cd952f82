"""Compare course runs: one run with another, or many runs over time.

Covers the differences, which of them are for the worse, and step times that are measured only for comparisons.
Not covered: the verdicts and the report of a single course run (`perf_helpers.course`), and the comparison of two
experiments in one lesson (`Lab.compare`).
"""
