"""Listeners for `tarry.listen`: attempt logs, logging, structlog, Prometheus and OpenTelemetry."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tarry.telemetry.attempt_logs import attempt_log

__all__ = ["attempt_log"]


def __getattr__(name: str) -> object:
    # Imported on first use, because the first failure of a program loads this package for the log.
    if name not in __all__:
        raise AttributeError(f"module 'tarry.telemetry' has no attribute {name!r}")
    from tarry.telemetry import attempt_logs

    value = globals()[name] = getattr(attempt_logs, name)
    return value
