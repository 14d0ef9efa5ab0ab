"""Benchmarks of flashtri beside every implementation that a user could pick instead.

`cases` says what is measured, `peers` how each implementation is called, `checks` that it is right before it is
timed, `timing` how long it takes, `results` what the committed results.json may hold.
"""
