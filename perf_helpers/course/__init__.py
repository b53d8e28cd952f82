"""The course as a whole: the ledger of claims, verdicts, lessons run by papermill, results and their report.

Covers everything from a claim and its measured value to the report of a course run. Not covered: how a number is
measured (`perf_helpers.lab`), the comparison of two course runs (`perf_helpers.compare`), and the widgets of a lesson
(`perf_helpers.widgets`).
"""
