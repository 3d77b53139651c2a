"""Formats of data that leaves the process: JSON bodies and HTTP headers. No I/O, as in the core."""
