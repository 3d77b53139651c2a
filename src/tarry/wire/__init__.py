"""Forms that cross a process border: plain values in, plain values out. Pure, like the core."""
