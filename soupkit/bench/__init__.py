"""The figures of the README: every hot path against a baseline measured in the same run.

A benchmark alternates baseline and candidate, so that a change of the machine's load meets both,
and reports the median of their ratio. No test asserts a time: timings are read by people.
"""
