"""The course as a whole: the ledger of claims and its verdicts, lessons run by papermill, results and their report.

Covers what is decided, kept and shown of a run of the course. Not covered: how a number is measured
(`perf_helpers.lab`), two runs of the course held against each other (`perf_helpers.compare`), and what a learner clicks
on (`perf_helpers.widgets`).
"""
