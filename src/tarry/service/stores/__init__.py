"""Implementations of `tarry.service.store.Store`: SQLite, in a file or in memory."""
