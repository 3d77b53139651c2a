"""The tests. The packages mirror those of `src/tarry`; shared helpers are imported from `tests`."""
