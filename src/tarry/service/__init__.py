"""The durable retry service: take a request, keep it, deliver it at least once."""
