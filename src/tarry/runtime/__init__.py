"""Drivers around the core: real clocks, dice, locks, threads and event loops."""
