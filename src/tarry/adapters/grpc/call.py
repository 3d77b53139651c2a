"""Retried gRPC calls: their state, and the call objects for users of `grpc` (not `grpc.aio`).

An attempt is the call object that gRPC returns for it. A blocking call returns its last attempt.
`future()` returns a `RetriedFuture`, and a call with a response stream returns a `RetriedStream`.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from copy import copy
from functools import partial
from importlib import import_module
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.adapters.http.send import OriginRegistry
from tarry.core.extras import require_extra
from tarry.core.outcome import PERMANENT, SUCCESS, Kind, Outcome, outcome_of_code
from tarry.core.verdict import Attempt
from tarry.errors import Cancelled, ConfigurationTypeError
from tarry.runtime import drivers
from tarry.runtime.call import RunningBlockCall
from tarry.runtime.effects import CancelToken, effects
from tarry.runtime.forks import PerProcess
from tarry.runtime.functions import check_not_async

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from tarry.adapters.http.send import DownstreamArgument
    from tarry.core.policy import Policy
    from tarry.runtime.config import RetryConfig

with require_extra("tarry.adapters.grpc needs grpcio", "grpc"):
    grpc: Any = import_module("grpc")  # Any, because grpcio has no type annotations

Repeatable: TypeAlias = "bool | Callable[[str], bool]"
"""Whether calls may be sent again after the server has read them: a bool for all methods, or a
function that takes the name of a method."""

_CANCELLED_DURING_BACKOFF = "cancelled while waiting for the next attempt"
_CLOCK_TOLERANCE_S = 0.01
"""gRPC measures deadlines with its own clock, which may be ahead of tarry's by this much."""
_MAX_WORKER_THREADS = 32
"""How many threads run the user's interceptors and callbacks, which would block the event loop."""
MAX_TRAILERS_ONLY_DELAY_S = 0.1
"""The longest time between empty initial metadata and the status of a response without headers.

gRPC reports empty initial metadata also for a response that consists only of trailers, but then the
status follows at once. If a call fails later than this, its empty metadata came in headers."""
_END_OF_STREAM = object()
_get_result = methodcaller("result")


class GrpcCall(RunningBlockCall):
    """The state of one gRPC call. gRPC itself enforces the time limits of the attempts.

    This is a `RunningBlockCall`, so that an outer retry loop does not look for a driver function in
    the traceback of the final error. gRPC raises this error again, possibly in another thread, and
    the traceback then has no driver function.
    """

    __slots__ = ("_attempt_ends_at", "_pending_first_attempt")

    def __init__(
        self, config: RetryConfig, started: float | None, deadline: float | None, record_number: int
    ) -> None:
        super().__init__(config, started, deadline, record_number)
        self._pending_first_attempt: Attempt | None = None
        """The first attempt, after `begin_first_attempt` and until `begin_attempt` returns it."""
        self._attempt_ends_at: float | None = None
        """The time at which the running attempt reaches its time limit."""

    def begin_first_attempt(self) -> None:
        """Begin the first attempt before a driver runs; the driver's `begin_attempt` returns it."""
        attempt = self.begin_attempt()
        if attempt.delay:
            self.wait_for_limiter(attempt)
        self._pending_first_attempt = Attempt(attempt.number)

    def begin_attempt(self) -> Attempt:
        """Begin the next attempt, without a timeout for the driver: gRPC enforces the limit."""
        pending, self._pending_first_attempt = self._pending_first_attempt, None
        if pending is not None:
            return pending
        attempt = super().begin_attempt()
        return Attempt(attempt.number, None, attempt.delay)

    def start_time_limit(self, attempt_timeout: float | None) -> float | None:
        """Start the time limit of an attempt now; return its seconds, or None without a limit."""
        now = effects.now()
        remaining = None if self.deadline is None else self.deadline - now
        limits = [limit for limit in (remaining, attempt_timeout) if limit is not None]
        self._attempt_ends_at = now + min(limits) if limits else None
        return min(limits, default=None)

    def try_continue(self, error: Exception, outcome: Outcome | None = None) -> bool:
        """Record a failed attempt; return whether another attempt follows."""
        outcome = outcome or self.config.classify_error(error, self._last_record_number)
        ends_at = self._attempt_ends_at
        has_timed_out = ends_at is not None and effects.now() >= ends_at - _CLOCK_TOLERANCE_S
        if outcome.timeout and outcome.kind is Kind.PERMANENT and has_timed_out:
            # DEADLINE_EXCEEDED was caused by the attempt's time limit, not by the server: retry.
            outcome = outcome.replace(kind=Kind.TRANSIENT)
        return super().try_continue(error, outcome)


class CallFactory:
    """Creates the calls of one interceptor; the arguments are those of `RetryInterceptor`."""

    def __init__(
        self,
        policy: Policy | None,
        downstream: DownstreamArgument,
        repeatable: Repeatable,
        target: str | None,
    ) -> None:
        if not isinstance(repeatable, bool):
            if not callable(repeatable):
                rule = "must be True, False or a function of the method's name"
                raise ConfigurationTypeError("repeatable", rule, repeatable)
            check_not_async("repeatable", repeatable)
        if not (target is None or (isinstance(target, str) and target)):
            rule = "must be the address for which the channel was created"
            raise ConfigurationTypeError("target", rule, target)
        self._repeatable = repeatable
        self._target = target
        self._origins = OriginRegistry(
            policy,
            downstream,
            self._classify_error,
            # A failed gRPC call raises: each response is a success and has nothing to release.
            classify_response=lambda _, __, ___: SUCCESS,
            release_connection=lambda _: None,
            async_client="grpc.aio with async_retry_interceptors()",
        )
        self.attempt_timeout: float | None = self._origins.policy.attempt_timeout

    def new_call(self, details: Any) -> GrpcCall:
        """Return a new call. The user's timeout, in the call's `details`, covers all attempts."""
        path = details.method  # such as "/shop.Payments/Charge"
        method = (path.decode() if isinstance(path, bytes) else str(path)).lstrip("/")
        operation, downstream_name = method, self._target
        if downstream_name is None:
            service, _, operation = method.rpartition("/")
            downstream_name = service or method
        repeatable = self._repeatable
        if not isinstance(repeatable, bool):
            repeatable = bool(repeatable(method))
        config = self._origins.retry_config(operation, downstream_name, repeatable=repeatable)
        call = GrpcCall.new(config)
        if details.timeout is not None:
            deadline = effects.now() + details.timeout
            call.deadline = deadline if call.deadline is None else min(deadline, call.deadline)
        return call

    def _classify_error(self, error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001 - passed by position
        if not isinstance(error, grpc.RpcError) or not hasattr(error, "code"):
            return PERMANENT
        rpc_error: Any = error
        return outcome_of_code(
            rpc_error.code().name,
            rpc_error.trailing_metadata() or (),
            retryable=self._origins.policy.retryable_codes,
            repeatable=repeatable,
        )


class RetriedCall:
    """The call object that the user gets. It makes the attempts and delegates to the latest one.

    The first attempt is already running when the user gets this object. The methods for the status
    and the metadata wait until no further attempt will be made. `send` starts another attempt.
    """

    def __init__(self, call: GrpcCall, send: Callable[[], Any], first_attempt: Any) -> None:
        super().__init__()
        self._cancel_token = CancelToken()
        call.config = copy(call.config)  # the original is shared by all calls of the method
        call.config.cancel = self._cancel_token
        self._call = call
        self._send = send
        self._latest_attempt = first_attempt
        self._is_first_attempt_pending = True
        """True until a driver gets the first attempt from `_next_attempt`."""
        # Later attempts, in any thread, run with the context variables of the first attempt.
        self._context = copy_context()

    def cancel(self) -> bool:
        """Cancel the running attempt, or the wait for the next one."""
        self._cancel_token.cancel()
        return bool(self._latest_attempt.cancel())

    def _drive(self, get_result: Callable[[Any], Any]) -> Any:
        """Make attempts in this thread until the call succeeds or is given up."""

        def make_attempt() -> Any:
            return self._attempt_result(get_result, self._next_attempt())

        try:
            return self._context.run(drivers.drive, self._call, make_attempt, (), {})
        except _CancelledAttempt as cancelled:
            raise cancelled.args[0] from None

    def _attempt_result(self, get_result: Callable[[Any], Any], attempt: Any) -> Any:
        """Return `get_result(attempt)`; mark its error if the user has cancelled the call."""
        try:
            return get_result(attempt)
        except Exception as error:
            if self._cancel_token.cancelled:
                raise _CancelledAttempt(error) from None
            raise

    def _wait_for_final_attempt(self) -> Any:
        """Wait until no further attempt will be made, and return the latest attempt."""
        raise NotImplementedError  # abstract: each subclass waits in its own way

    def code(self) -> Any:
        """Wait for the call and return its status code."""
        return self._wait_for_final_attempt().code()

    def details(self) -> Any:
        """Wait for the call and return the details of its status."""
        return self._wait_for_final_attempt().details()

    def initial_metadata(self) -> Any:
        """Wait for the call and return the initial metadata of its last attempt."""
        return self._wait_for_final_attempt().initial_metadata()

    def trailing_metadata(self) -> Any:
        """Wait for the call and return the trailing metadata of its last attempt."""
        return self._wait_for_final_attempt().trailing_metadata()

    def debug_error_string(self) -> Any:
        """Wait for the call and return gRPC's debug information about its last attempt."""
        return self._wait_for_final_attempt().debug_error_string()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._latest_attempt, name)

    def _next_attempt(self) -> Any:
        """Return the first attempt, which is already running, or start a new one."""
        if self._is_first_attempt_pending:
            self._is_first_attempt_pending = False
        else:
            self._latest_attempt = self._send()
            if self._cancel_token.cancelled:  # `cancel` came before the new attempt was stored
                self._latest_attempt.cancel()
        return self._latest_attempt


class _CancelledAttempt(BaseException):
    """Holds the error of a cancelled attempt. Drivers do not retry a `BaseException`."""


# grpcio is untyped, so type checkers do not know the base class.
class _StreamCancelled(Cancelled, grpc.RpcError):  # type: ignore[misc]  # pyright: ignore[reportUntypedBaseClass]
    """The user cancelled a stream that was waiting for its next attempt."""

    def code(self) -> Any:
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        return _CANCELLED_DURING_BACKOFF


class RetriedStream(RetriedCall):
    """A response stream that is retried until its headers arrive, as gRFC A6 requires."""

    def __init__(self, call: GrpcCall, send: Callable[[], Any], first_attempt: Any) -> None:
        super().__init__(call, send, first_attempt)
        self._has_final_attempt = False
        """Whether no attempt will follow `_latest_attempt`."""
        self._callbacks: list[tuple[str, Callable[..., None]]] = []
        """The user's callbacks for the final attempt, each with the name of the method for it."""
        self._lock = threading.RLock()  # one thread may read while another waits for the status
        self._unread: list[Any] = []
        """The first message, if it was read to wait for the headers, until the user reads it."""
        self._error: BaseException | None = None
        """The error with which the call was given up, until `__next__` raises it."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._wait_for_final_attempt()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: break the reference cycle
        return self._unread.pop() if self._unread else next(self._latest_attempt)

    def initial_metadata(self) -> Any:
        """Wait for the headers of the final attempt, but for no message; return its metadata."""
        return self._wait_for_final_attempt(_await_headers).initial_metadata()

    def _wait_for_final_attempt(
        self, await_headers: Callable[[Any], list[Any]] | None = None
    ) -> Any:
        """Make attempts until one gets headers or the call is given up; return the last attempt.

        `await_headers` waits for the headers of an attempt, and returns the messages that it read.
        """
        with self._lock:
            if self._has_final_attempt:
                return self._latest_attempt
            try:
                self._unread = self._drive(await_headers or _await_headers_or_message)
            except Cancelled as error:  # during a wait between two attempts
                self._error = _StreamCancelled(str(error))
                self._error.__cause__ = error.__cause__
            except Exception as error:
                self._error = error
            finally:
                self._end_retries()
        return self._latest_attempt

    def next(self) -> Any:
        """Return the next message."""
        return next(self)

    def cancel(self) -> bool:
        """Cancel the stream, or the wait for its next attempt."""
        if self._is_first_attempt_pending:  # no driver runs that would end the call
            self._call.abort()
            self._end_retries()
        return super().cancel()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call `callback` when the stream ends; return False if it has ended already."""
        return self._add_callback("add_callback", callback) is not False

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call `fn` when the stream ends."""
        self._add_callback("add_done_callback", fn)

    def _add_callback(self, method: str, callback: Callable[..., None]) -> Any:
        if self._has_final_attempt:
            return getattr(self._latest_attempt, method)(callback)
        # Another attempt may follow the running one: keep the callback for the final attempt.
        self._callbacks.append((method, callback))
        return True

    def _end_retries(self) -> None:
        """Mark the latest attempt as final, and add the user's callbacks to it."""
        self._has_final_attempt = True
        while self._callbacks:
            method, callback = self._callbacks.pop(0)
            # `add_callback` returns False if the attempt has already ended.
            if getattr(self._latest_attempt, method)(callback) is False:
                callback()


def _await_headers(attempt: Any) -> list[Any]:
    """Wait for the headers of a stream; raise if it fails without headers."""
    if attempt.initial_metadata():
        return []
    has_ended = threading.Event()
    is_running = attempt.add_callback(has_ended.set)
    if is_running and not has_ended.wait(MAX_TRAILERS_ONLY_DELAY_S):
        return []
    return _read_message(attempt)


def _await_headers_or_message(attempt: Any) -> list[Any]:
    """Like `_await_headers`, but if the headers are empty, wait for the first message."""
    if attempt.initial_metadata():
        return []
    headers_received_at = effects.now()
    try:
        return _read_message(attempt)
    except grpc.RpcError:
        if effects.now() - headers_received_at < MAX_TRAILERS_ONLY_DELAY_S:
            raise
        return []  # the attempt had headers, so it is final; reading it raises the error again


def _read_message(attempt: Any) -> list[Any]:
    """Return a list with the next message of a stream; an empty list at the end of the stream."""
    message = next(attempt, _END_OF_STREAM)
    return [] if message is _END_OF_STREAM else [message]


class RetriedFuture(RetriedCall, Future[Any]):
    """A unary call. If its first attempt fails, it is retried in a background event loop."""

    def __init__(self, call: GrpcCall, send: Callable[[], Any], first_attempt: Any) -> None:
        super().__init__(call, send, first_attempt)
        self._task: asyncio.Task[None] | None = None
        """Runs `_retry`; None unless the first attempt has failed."""
        first_attempt.add_done_callback(self._on_first_attempt_done)

    def _on_first_attempt_done(self, first_attempt: Any) -> None:
        if first_attempt.code() is not grpc.StatusCode.OK:
            loop = _background_loop()
            loop.call_soon_threadsafe(self._start_task, loop, context=self._context)
            return
        try:
            result = self._drive(_get_result)
        except BaseException as error:  # raised by the user's budget or limiter
            self.set_exception(error)
        else:
            self.set_result(result)

    def _start_task(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._retry())

    async def _retry(self) -> None:
        try:
            result = await drivers.drive_async(self._call, self._make_attempt, (), {})
            finish = partial(self.set_result, result)
        except _CancelledAttempt as cancelled:
            finish = partial(self.set_exception, cancelled.args[0])
        except asyncio.CancelledError:  # only `cancel` cancels this task
            finish = partial(self.set_exception, grpc.FutureCancelledError())
        except Exception as error:
            finish = partial(self.set_exception, error)
        try:
            await asyncio.to_thread(finish)  # in a thread, because the user's callbacks may block
        except RuntimeError:  # at shutdown, the interpreter starts no more threads
            finish()

    async def _make_attempt(self) -> Any:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        if self._is_first_attempt_pending:
            attempt = self._next_attempt()
        else:  # in a thread: interceptors that run after the retry interceptor may block
            attempt = await asyncio.to_thread(self._next_attempt)

        def on_done(_attempt: Any) -> None:
            loop.call_soon_threadsafe(done.set)

        attempt.add_done_callback(on_done)
        await done.wait()
        return self._attempt_result(_get_result, attempt)

    def cancel(self) -> bool:
        """Cancel the call; return False if it is done."""
        if self.done():
            return False
        super().cancel()
        if (task := self._task) is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)
        return True

    def cancelled(self) -> bool:
        """Return whether the user has cancelled the call."""
        return self._cancel_token.cancelled and (not self.done() or self._was_cancelled())

    def running(self) -> bool:
        """Return whether the call is not done yet."""
        return not self.done()

    is_active = running

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the response and return it, or raise the call's error."""
        if (error := self.exception(timeout)) is not None:
            raise error
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call and return its error, or None after a success."""
        try:
            error = super().exception(timeout)
        except TimeoutError:
            raise grpc.FutureTimeoutError from None
        if error is not None and isinstance(error, grpc.FutureCancelledError):
            raise error
        return error

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        """Wait for the call and return the traceback of its error."""
        error = self.exception(timeout)
        return None if error is None else error.__traceback__

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call `callback` when the call is done; return False if it is done already."""
        if self.done():
            return False
        self.add_done_callback(lambda _: callback())
        return True

    def code(self) -> Any:
        """Wait for the call and return its status code."""
        return grpc.StatusCode.CANCELLED if self._was_cancelled() else super().code()

    def details(self) -> Any:
        """Wait for the call and return the details of its status."""
        return _CANCELLED_DURING_BACKOFF if self._was_cancelled() else super().details()

    def _wait_for_final_attempt(self) -> Any:
        super().exception()
        return self._latest_attempt

    def _was_cancelled(self) -> bool:
        return isinstance(super().exception(), grpc.FutureCancelledError)


_loop_lock = PerProcess(threading.Lock)
_loops: PerProcess[list[asyncio.AbstractEventLoop]] = PerProcess(list)
"""Holds the background event loop of all `RetriedFuture`s; empty until it is started. A forked
child starts its own, because the loop's thread exists only in the parent."""


def _background_loop() -> asyncio.AbstractEventLoop:
    """Return the background loop; start it if it is not running."""
    with _loop_lock.value:
        if not _loops.value:
            loop = asyncio.new_event_loop()
            loop.set_default_executor(ThreadPoolExecutor(_MAX_WORKER_THREADS, "tarry-grpc-worker"))
            threading.Thread(target=loop.run_forever, name="tarry-grpc-loop", daemon=True).start()
            _loops.value.append(loop)
        return _loops.value[0]


grpc.Call.register(RetriedStream)
grpc.Call.register(RetriedFuture)
grpc.Future.register(RetriedFuture)
