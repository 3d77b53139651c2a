"""The engines behind the port: memory for tests, SQLite by default."""
