"""The engine, which accepts tasks and runs their attempts, in lanes (one queue per downstream)."""
