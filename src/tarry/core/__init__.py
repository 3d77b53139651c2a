"""Pure decisions: whether a call is retried, and when.

The modules of this package have no clock, no random numbers, no locks, no I/O and no logging. `now`
(seconds of a monotonic clock in the library, epoch seconds in the retry service) and
`random_number` (from [0, 1)) are arguments, so that every run can be repeated exactly.
"""
