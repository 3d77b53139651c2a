"""The durable retry service: stores requests and delivers each of them at least once."""
