"""Where records are kept, one file for each engine."""
