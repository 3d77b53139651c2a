"""Stores for idempotency records, one module for each database."""
