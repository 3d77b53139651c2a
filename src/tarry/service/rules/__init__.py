"""Decisions of the service that each store engine applies: pure functions and tables, no I/O."""
