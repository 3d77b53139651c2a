"""Listeners for `tarry.listen`: logging, structlog, Prometheus and OpenTelemetry."""
