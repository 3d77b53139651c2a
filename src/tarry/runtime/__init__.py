"""Runs the core (the decisions) with real clocks, random numbers, locks, threads, event loops."""
