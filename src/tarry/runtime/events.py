"""The one event stream: what happens to calls, handed to whoever listens.

With nobody listening, a call that succeeds pays for one attribute test.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationTypeError

if TYPE_CHECKING:
    from tarry.core.events import Event

Listener = Callable[["Event"], None]


LOG_WARNING = 30
"""The level of the standard library's logging, which is not loaded before the first failure."""

_LOG = "tarry.telemetry.logs"
"""The logger that comes with the package: by name, because it listens to this and not the reverse.

Here and not in the package's own file, because programs may import an adapter and nothing else."""


class _Entry:
    """One `listen`: the same function may listen twice, and each is removed on its own."""

    __slots__ = ("_listener",)

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __call__(self, event: Event) -> None:
        self._listener(event)

    def __repr__(self) -> str:
        return repr(self._listener)


class EventBus:
    """The listeners of this process."""

    __slots__ = ("listeners", "lock", "log", "log_enabled", "serial")

    def __init__(self) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.listeners: tuple[Listener, ...] = ()
        """Those that the user added. They hear every event."""
        self.log: Listener | None = None
        """The logger that comes with the package. It hears of trouble only."""
        self.log_enabled: Callable[[int], bool] = self._first_asked
        """Whether the logger would write at a level; it is loaded when this is first asked."""
        self.serial: int = 0
        """Counts the errors that were marked; see `marks`."""

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Hand every event to `listener` from now on; the answer takes it off again."""
        if not callable(listener) or isinstance(listener, type):
            made = f": make one, {listener.__name__}()" if isinstance(listener, type) else ""
            msg = f"listen takes a function of one event, got {listener!r}{made}"
            raise ConfigurationTypeError(msg)
        entry = _Entry(listener)
        with self.lock:
            self.listeners = (*self.listeners, entry)

        def remove() -> None:
            with self.lock:
                self.listeners = tuple(other for other in self.listeners if other is not entry)

        return remove

    def is_observed(self) -> bool:
        """Say whether anybody wants to hear of trouble."""
        return bool(self.listeners) or self.log_enabled(LOG_WARNING)

    def emit(self, event: Event) -> None:
        """Hand an event out. A listener that raises does not break a call."""
        log = self.log or self._loaded_log()
        for listener in (log, *self.listeners):
            try:
                listener(event)
            except Exception:
                import logging

                logger = logging.getLogger("tarry")
                logger.exception("listener %r raised; the call goes on", listener)

    def _first_asked(self, level: int) -> bool:
        self._loaded_log()
        return self.log_enabled(level)

    def _loaded_log(self) -> Listener:
        logs: Any = import_module(_LOG)
        log: Listener = logs.log
        self.log, self.log_enabled = log, logs.enabled
        return log


bus: EventBus = EventBus()


def _after_fork() -> None:
    bus.lock = threading.Lock()  # whoever held it is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

listen: Callable[[Listener], Callable[[], None]] = bus.listen
