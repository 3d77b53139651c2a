"""The writer process: the SQLite operations that change the file run outside the service's process.

Otherwise SQLite and the event loop would take turns on one interpreter lock (GIL). The service
starts the writer process, which runs `main`, and exchanges frames with it over its standard input
and output. A frame is a header (the payload's length) and a payload. The service sends the calls of
a group, which are committed together. The process sends back their answers (values or errors), in
the order of the groups. A call is the name of an operation in `OPERATIONS`, and its arguments. With
the answers, the process sends its log records, because only the service knows how to format them.

The writer process ends when its input is closed, so it never outlives the service. If it ends
earlier, the service starts it again. The calls that it had received then fail with
`StoreUnavailable`, although they may have been committed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import struct
import sys
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from msgspec import Raw
from msgspec.msgpack import Decoder, Encoder

from tarry import errors
from tarry.errors import StoreUnavailable
from tarry.service.stores.sqlite.clock import AnchoredClock
from tarry.service.stores.sqlite.database import SqliteDatabase
from tarry.service.stores.sqlite.executor import Executor
from tarry.service.stores.sqlite.operations import OPERATIONS, OperationCall, write_operation
from tarry.service.stores.sqlite.transaction import WriteTransaction
from tarry.service.stores.sqlite.worker_locks import WorkerLock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.group_commit import CommitGroup
    from tarry.service.stores.sqlite.database import Answer

P = ParamSpec("P")
T = TypeVar("T")

_logger = logging.getLogger("tarry.service")
_MAIN_PROGRAM = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
_EXIT_TIMEOUT_S = 10.0
_FRAME_HEADER = struct.Struct("!Q")
"""The header of a frame: the length of the payload in bytes."""


@write_operation
def ping(tx: WriteTransaction) -> int:
    """Make a small write, to check that the store works; return the store's time."""
    tx.execute("UPDATE meta SET value = ? WHERE name = 'pinged'", (tx.now,))
    return tx.now


class LogCollector(logging.Handler):
    """Keeps the level and the text of log records until they are sent to the service."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self._records.append((record.levelno, self.format(record)))

    def take_records(self) -> list[tuple[int, str]]:
        """Return the records since the last call."""
        records, self._records = self._records, []
        return records


class WriterProcessExecutor(Executor):
    """Runs groups in the writer process, which starts after `database` has created the file.

    `database` holds the `WorkerLock`, which shows other processes that this service is alive. The
    writer process gets the token of the lock, with which it marks the leases of this service.
    """

    def __init__(self, database: SqliteDatabase) -> None:
        super().__init__()
        self._database = database
        self.process: WriterProcess | None = None
        self._process_start: asyncio.Task[None] | None = None
        self._is_closing = False

    async def close(self) -> None:
        """End the process when all submitted operations have run."""
        await super().close()
        self._is_closing = True
        if self.process is not None:
            await self.process.close()

    def _start_group(self) -> None:
        if self.process is not None:
            super()._start_group()
            return
        self._is_start_scheduled = False
        if self._can_start() and self._process_start is None:
            self._process_start = self._loop.create_task(self._start_process())

    async def _start_process(self) -> None:
        try:
            await asyncio.to_thread(self._database.prepare)
            lock = self._database.worker_lock
            token = "" if lock is None else lock.token or ""
            _, self.process = await self._loop.subprocess_exec(
                lambda: WriterProcess(self._on_answers, self._on_process_end),
                sys.executable, "-c", _MAIN_PROGRAM,
                str(self._database.path), token, version("tarry"),
                stderr=None,
                # Ctrl-C signals all processes of the terminal's process group. It is meant for the
                # service, which still has results to write before it ends.
                start_new_session=True,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - passed to all callers that wait for the process
            while self._has_waiting:
                self._fail(self._take_group(), error)
        finally:
            self._process_start = None
        self._schedule_start()

    def _send_group(self, group: CommitGroup) -> None:
        payload = encode_calls(group.operations)
        assert self.process is not None  # noqa: S101 - `_start_group` has checked it
        # If the process has ended, uvloop may raise an error here. The error is ignored, because
        # uvloop calls `_on_process_end` later, which sets the error of this group.
        with suppress(OSError, RuntimeError):
            self.process.send(payload)

    def _on_answers(self, payload: bytes) -> None:
        group = self._groups_in_flight[0]
        try:
            answers = decode_answers(group.operations, payload)
        except Exception as error:  # noqa: BLE001 - else the callers would wait for ever
            self._fail(group, error)
        else:
            self._set_answers(group, answers)

    def _on_process_end(self) -> None:
        self.process = None
        msg = f"the writer process of {self._database.path} has ended, and is started again"
        if not self._is_closing:
            _logger.warning(msg)
        for group in tuple(self._groups_in_flight):
            self._fail(group, StoreUnavailable(msg))
        self._schedule_start()


class WriterProcess(asyncio.SubprocessProtocol):
    """The running writer process; calls `on_payload` for each frame that the process sends."""

    def __init__(self, on_payload: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_payload = on_payload
        self._on_end = on_end
        self._received = bytearray()
        self._ended = asyncio.Event()

    def send(self, payload: bytes) -> None:
        """Write a frame with this payload to the input of the process."""
        self._input.write(_FRAME_HEADER.pack(len(payload)) + payload)

    async def close(self) -> None:
        """Close the input, so that the process ends, and kill the process if it does not."""
        self._input.close()
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError:
            self._transport.kill()
            await self._ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called when the process has started."""
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self.pid: int = self._transport.get_pid()
        self._input = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called with the next bytes of the process's output, which may end within a frame."""
        del fd
        self._received += data
        while len(self._received) >= _FRAME_HEADER.size:
            end = _FRAME_HEADER.size + _FRAME_HEADER.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            payload = bytes(self._received[_FRAME_HEADER.size : end])
            del self._received[:end]
            self._on_payload(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the process has ended."""
        del exc
        self._transport.close()
        self._ended.set()
        self._on_end()


_encode = Encoder().encode
_calls_decoder = Decoder(list[tuple[str, Raw]])
_answers_decoder = Decoder(tuple[list[tuple[Raw, tuple[str, str] | None]], list[tuple[int, str]]])


def encode_calls(calls: Sequence[OperationCall[Any]]) -> bytes:
    """Return a payload with the operation name and the arguments of each call."""
    return _encode([(call.name, call.arguments) for call in calls])


def run_calls(database: SqliteDatabase, payload: bytes, log: LogCollector) -> bytes:
    """Run the calls of a payload in one transaction.

    Return the payload with their answers and the records of `log`.
    """
    calls: list[OperationCall[Any]] = []
    for name, arguments in _calls_decoder.decode(payload):
        operation = OPERATIONS[name]
        calls.append(OperationCall(operation.run, *operation.decode_arguments(arguments)))
    answers = [
        (value, None if error is None else (type(error).__name__, str(error)))
        for value, error in database.apply(calls)
    ]
    return _encode((answers, log.take_records()))


def decode_answers(calls: Sequence[OperationCall[Any]], payload: bytes) -> list[Answer]:
    """Return the answers in a payload, and log its records; `calls` are those of the same group."""
    answers, log_records = _answers_decoder.decode(payload)
    for level, text in log_records:
        _logger.log(level, "%s", text)
    return [
        (OPERATIONS[call.name].decode_result(value), None)
        if error is None
        else (None, _decode_error(*error))
        for call, (value, error) in zip(calls, answers, strict=True)
    ]


def _decode_error(class_name: str, message: str) -> Exception:
    """Return an error of this class if it is in `tarry.errors`, else a `RuntimeError`."""
    error_class = getattr(errors, class_name, None)
    if isinstance(error_class, type):
        return cast("Exception", error_class(message))
    return RuntimeError(f"{class_name}: {message}")


def main(path: str, lock_token: str, service_version: str) -> None:
    """Run the calls of each frame from standard input, until the input is closed."""
    if service_version != version("tarry"):  # frames of another version cannot be decoded safely
        sys.exit("tarry was upgraded while the service ran: restart the service")
    # A supervisor may signal all processes. The service, which still has results to write, decides
    # when this process ends.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # a stray print() must not end up between two frames
    log = LogCollector()
    _logger.addHandler(log)
    clock = AnchoredClock(logs_deviation=False)  # the service logs it
    database = SqliteDatabase(path, clock, WorkerLock(path, lock_token or None))
    header_size = _FRAME_HEADER.size
    with suppress(BrokenPipeError):  # the service has ended
        # A short read also means that the service has ended.
        while len(header := source.read(header_size)) == header_size:
            [length] = _FRAME_HEADER.unpack(header)
            if len(payload := source.read(length)) < length:
                break
            answer_payload = run_calls(database, payload, log)
            sink.write(_FRAME_HEADER.pack(len(answer_payload)) + answer_payload)
            sink.flush()
    database.close()
