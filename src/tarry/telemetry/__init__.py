"""Listeners of the event stream. Each file is one; they know nothing of each other."""
