"""Pure decisions: whether a call is retried, and when.

The modules of this package have no clock, no random numbers, no locks, no I/O and no logging. `now`
(seconds on one monotonic time base) and `u` (a random number from [0, 1)) are arguments, so that
every run can be repeated exactly.
"""
