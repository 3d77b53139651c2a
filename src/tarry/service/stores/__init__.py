"""Implementations of the store port: SQLite, in a file or in memory."""
