"""Pure decisions: whether a call is retried, and when.

No clock, no dice, no lock, no I/O and no logging lives below this folder. `now` (seconds on any
one monotonic base) and `u` (a number drawn from [0, 1)) are arguments, so that every run can be
replayed.
"""
