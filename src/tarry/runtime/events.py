"""The event bus of the process, which passes the events of calls to listeners.

Without listeners, the bus costs a successful call only the test of one attribute.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from tarry.errors import ConfigurationTypeError
from tarry.runtime.effects import effects
from tarry.runtime.forks import PerProcess, around_fork

if TYPE_CHECKING:
    from tarry.core.events import Event

Listener: TypeAlias = Callable[["Event"], None]
"""A function that gets every event: the argument of `listen`."""

E = TypeVar("E", bound="Event")

LOG_WARNING = 30
"""The value of `logging.WARNING`. `logging` itself is not imported before the first failure."""

_LOG_LISTENER_MODULE = "tarry.telemetry.logs"
"""The module of the built-in log listener. It is imported on first use, because programs without
failures do not need it, and by name, because `runtime` must not depend on `telemetry`."""

_IMPORTED_LATE = (
    "difflib", "opcode", "tarry.core.events", "tarry.core.hints", "tarry.runtime.downstream",
    "tarry.runtime.hedge", "tarry.runtime.parallel",
)  # fmt: skip
"""The modules that calls import when they first need them, for example after the first failure;
without `logging` and the log listener, see `_finish_imports`."""

_log_import_lock = PerProcess(threading.RLock)
"""Held while a thread imports `logging`, and during a fork."""


def _finish_imports() -> None:
    """Wait until no thread is importing a module that calls import late.

    A child inherits the lock of a module that another thread is importing. As the child does not
    have that thread, it would wait for the lock for ever.

    `logging` cannot be imported here: its import registers functions for forks, too late for those
    that should run before this fork. So a thread that imports it waits until the fork is over.
    """
    for name in _IMPORTED_LATE:
        import_module(name)
    _log_import_lock.value.acquire()


def _allow_imports() -> None:
    _log_import_lock.value.release()


around_fork(_finish_imports, _allow_imports)


class EventBus:
    """The listeners of this process, and the number of the newest error record."""

    __slots__ = (
        "_call_number", "_process_id", "is_log_enabled", "last_record_number", "listeners", "lock",
        "log_listener",
    )  # fmt: skip

    def __init__(self) -> None:
        self.lock: PerProcess[threading.Lock] = PerProcess(threading.Lock)
        self.listeners: tuple[Listener, ...] = ()
        """The user's listeners, which get every event."""
        self.log_listener: Listener | None = None
        """The built-in log listener; None until it is loaded. It logs nothing for calls whose first
        attempt succeeds."""
        self.is_log_enabled: Callable[[int], bool] = self._load_log_and_check
        """Takes a level, and returns whether the log listener logs at it. The first call loads the
        listener."""
        self.last_record_number: int = 0
        """The number of the newest error record that forbids outer retries: see `error_record`."""

        self._process_id: PerProcess[str] = PerProcess(lambda: os.urandom(8).hex())
        self._call_number = count(1)

    def new_call_id(self) -> str:
        """Return an id for the events of a call, which no other call of any process has."""
        return f"{self._process_id.value}-{next(self._call_number)}"

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every event from now on; return a function that removes it."""
        if not callable(listener) or isinstance(listener, type):
            advice = f": pass {listener.__name__}()" if isinstance(listener, type) else ""
            rule = "listen takes a function with the event as its argument"
            raise ConfigurationTypeError(f"{rule}, got {listener!r}{advice}")
        subscription = partial(listener)  # a new object: a function may be added twice
        with self.lock.value:
            self.listeners = (*self.listeners, subscription)

        def remove() -> None:
            with self.lock.value:
                self.listeners = tuple(item for item in self.listeners if item is not subscription)

        return remove

    def is_observed(self) -> bool:
        """Return whether there is a listener, or the log is enabled for warnings."""
        return bool(self.listeners) or self.is_log_enabled(LOG_WARNING)

    def emit(self, event: Event, *, is_logged: bool = True) -> None:
        """Call all listeners with an event, and log it unless `is_logged` is False."""
        if is_logged:
            notify(self.log_listener or self._load_log_listener(), event)
        for listener in self.listeners:
            notify(listener, event)

    def _load_log_and_check(self, level: int) -> bool:
        self._load_log_listener()
        return self.is_log_enabled(level)

    def _load_log_listener(self) -> Listener:
        logs = _import_log_module()
        log_listener: Listener = logs.log
        self.log_listener, self.is_log_enabled = log_listener, logs.is_enabled
        return log_listener


def stamp(event: E, call_id: str) -> E:
    """Set the id of the call and the time of a new event, which no listener has got yet."""
    object.__setattr__(event, "call_id", call_id)
    object.__setattr__(event, "time", effects.unix_time())
    return event


def notify(listener: Callable[[Any], object], event: Event) -> None:
    """Call a listener with an event. A listener that raises does not affect the call."""
    try:
        listener(event)
    except Exception as error:
        _log_ignored_error("event listener", "listener", listener, error)


def call_on_retry(on_retry: Callable[[Any], object], event: Event) -> None:
    """Call the function `on_retry` of a call. A function that raises does not affect the call."""
    try:
        on_retry(event)
    except Exception as error:
        _log_ignored_error("on_retry", "function", on_retry, error)


async def call_on_retry_async(on_retry: Callable[[Any], object], event: Event) -> None:
    """Like `call_on_retry`; if the function is a coroutine function, await it."""
    try:
        result = on_retry(event)
        if hasattr(result, "__await__"):
            await cast("Awaitable[object]", result)
    except Exception as error:
        _log_ignored_error("on_retry", "function", on_retry, error)


def _import_log_module() -> Any:
    with _log_import_lock.value:
        return import_module(_LOG_LISTENER_MODULE)


def _log_ignored_error(caller: str, label: str, function: object, error: Exception) -> None:
    function = getattr(function, "func", function)  # unwraps the partial of `listen`
    message = "%s raised an error, which is ignored, %s=%r"
    _import_log_module().logger.error(message, caller, label, function, exc_info=error)


def log_listener_for(logger: object) -> Listener:
    """Return a listener that logs events to this logger, as the built-in listener does."""
    return partial(_import_log_module().log, logger=logger)


bus: EventBus = EventBus()
listen: Callable[[Listener], Callable[[], None]] = bus.listen
