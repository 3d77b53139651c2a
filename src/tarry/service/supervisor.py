"""The supervisor: runs several processes of the service on one address (`tarry serve --workers`).

Each process has its own listening socket for the address (SO_REUSEPORT), so that the kernel
distributes the connections evenly. With one shared socket, the process that wakes up first would
accept all waiting connections. The supervisor opens the sockets and keeps them open: while a
process is restarted, its new connections wait instead of being refused.

A process that exits is restarted. The delay before a restart grows while the process keeps exiting
early. During the delay its socket is closed, so that the other processes get the connections. If a
process exits before all of them have been ready once, the supervisor stops them all.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_logger = logging.getLogger("tarry.service")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MAX_RESTART_DELAY_S = 30.0
_EARLY_EXIT_S = 60.0
"""A process that has run for less than this time has exited early."""


class SupervisedProcess:
    """One process of the service, in the supervisor and, after the fork, in the process itself."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.listeners: list[socket.socket] = []
        self.pid: int | None = None
        self.channel: socket.socket | None = None
        """One end of a socket pair between supervisor and process. The process sends a byte when it
        is ready. The kernel closes the end of the supervisor when the supervisor exits."""
        self.is_ready: bool = False
        self.started_at: float = 0.0
        self.restart_at: float | None = None
        """When the process will be restarted; None while it runs."""
        self.early_exits = 0
        """Number of consecutive exits, counting from the last one that was not early."""

    def report_ready(self) -> None:
        """Notify the supervisor that this process accepts connections.

        Called in the new process, in its event loop. From now on, the process stops when the
        supervisor exits.
        """
        from asyncio import get_running_loop

        assert self.channel is not None  # noqa: S101 - set by the fork
        self.channel.settimeout(0)
        with suppress(OSError):
            self.channel.send(b"\0")
        get_running_loop().add_reader(self.channel, self._on_supervisor_exit)

    def _on_supervisor_exit(self) -> None:
        from asyncio import get_running_loop

        assert self.channel is not None  # noqa: S101 - set by the fork
        get_running_loop().remove_reader(self.channel)
        _logger.error("supervisor exited, stopping this process, pid=%d", os.getpid())
        os.kill(os.getpid(), signal.SIGTERM)

    def close_listeners(self) -> None:
        """Close the listening sockets."""
        for listener in self.listeners:
            listener.close()
        self.listeners = []


def restart_delay_s(early_exits: int) -> float:
    """Return the seconds before a restart; see `SupervisedProcess.early_exits`."""
    return 0.0 if early_exits <= 1 else min(_MAX_RESTART_DELAY_S, 2.0 ** (early_exits - 2))


class Supervisor:
    """Runs `count` processes that listen on `host` and `port`.

    With `process_port`, the process number n, from 0, also listens on `process_port` + n. `scheme`
    is that of the service's URL.
    """

    def __init__(
        self, count: int, host: str, port: int, *, process_port: int = 0, scheme: str = "http"
    ) -> None:
        self._scheme = scheme
        self._host = host
        self._port = port
        self._process_port = process_port
        self._processes = [SupervisedProcess(number) for number in range(count)]
        self._pending_signals: list[int] = []
        """Received signals that were not handled yet."""
        self._stop_signal: int | None = None
        self._has_failed = False
        self.was_ready: bool = False
        """Whether all processes have been ready at least once."""

    @property
    def stop_signal(self) -> int | None:
        """The signal that stopped the processes."""
        return self._stop_signal

    def open_listeners(self) -> str:
        """Bind the sockets; return the URL of the service. Raises OSError."""
        for process in self._processes:
            # Without SO_REUSEPORT first: this fails if another program listens on the port.
            if process.number == 0:
                for listener in _bind(self._host, self._port, reuse_port=False):
                    listener.close()
            self._open_listeners_of(process)
        host, port = self._processes[0].listeners[0].getsockname()[:2]
        return (
            f"{self._scheme}://[{host}]:{port}"
            if ":" in host
            else f"{self._scheme}://{host}:{port}"
        )

    def _open_listeners_of(self, process: SupervisedProcess) -> None:
        process.listeners = _bind(self._host, self._port, reuse_port=True)
        self._port = process.listeners[0].getsockname()[1]  # if it was 0: a free port
        if self._process_port:
            port = self._process_port + process.number
            process.listeners += _bind(self._host, port, reuse_port=False)

    def run(self, on_ready: Callable[[], None]) -> SupervisedProcess | None:
        """Run the processes until a signal stops them; `on_ready` is called when all are ready.

        In the supervisor, returns None when all processes have exited. Each new process returns
        from this method, too, with its own `SupervisedProcess`.
        """
        with self._capture_signals() as wakeup:
            for process in self._processes:
                if self._start(process):
                    return process
            while True:
                self._wait(wakeup)
                self._forward_signals()
                self._reap()
                if not self.was_ready and all(process.is_ready for process in self._processes):
                    self.was_ready = True
                    on_ready()
                is_stopping = self._stop_signal is not None or self._has_failed
                if is_stopping and all(process.pid is None for process in self._processes):
                    break
                for process in self._processes:
                    restart_at = process.restart_at
                    if restart_at is None or is_stopping or effects.now() < restart_at:
                        continue
                    if self._start(process):
                        return process
        for process in self._processes:
            process.close_listeners()
        return None

    def _start(self, process: SupervisedProcess) -> bool:
        """Start a process; return True in the new process, False in the supervisor."""
        process.restart_at, process.is_ready = None, False
        process.started_at = effects.now()
        if not process.listeners:
            try:
                self._open_listeners_of(process)
            except OSError as error:
                self._schedule_restart(process, f"cannot open its port ({error})")
                return False
        own_end, other_end = socket.socketpair()
        # Signals are blocked until the new process has left `_capture_signals`: the handlers of the
        # supervisor would swallow a signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        process.pid = os.fork()
        if process.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
            other_end.close()
            process.channel = own_end
            return False
        own_end.close()
        # A new session: Ctrl-C in a terminal reaches only the supervisor, which forwards it.
        os.setsid()
        for other in self._processes:
            if other.channel is not None:
                other.channel.close()
            if other is not process:
                other.close_listeners()
        process.channel = other_end
        return True

    def _wait(self, wakeup: socket.socket) -> None:
        """Wait for a signal, for a process that becomes ready, or for the time of a restart."""
        times = [each.restart_at for each in self._processes if each.restart_at is not None]
        timeout = max(0.0, min(times) - effects.now()) if times else None
        with selectors.DefaultSelector() as selector:
            selector.register(wakeup, selectors.EVENT_READ)
            for process in self._processes:
                if process.channel is not None and not process.is_ready:
                    selector.register(process.channel, selectors.EVENT_READ, process)
            for key, _ in selector.select(timeout):
                if key.data is None:
                    wakeup.recv(4096)
                else:
                    self._receive(key.data)

    def _receive(self, process: SupervisedProcess) -> None:
        """Read from the channel of a process: a byte if it is ready, nothing if it has exited."""
        assert process.channel is not None  # noqa: S101 - it was selected
        if process.channel.recv(1):
            process.is_ready = True
            if self.was_ready:
                _logger.info("process is ready, pid=%s", process.pid)
        else:
            process.channel.close()
            process.channel = None

    def _forward_signals(self) -> None:
        while self._pending_signals:
            number = self._pending_signals.pop(0)
            # The first signal stops the processes gracefully. A second SIGINT stops them at once.
            forwarded = signal.SIGTERM if self._stop_signal is None else number
            self._stop_signal = self._stop_signal or number
            self._send_signal(forwarded)

    def _send_signal(self, number: int) -> None:
        for process in self._processes:
            process.restart_at = None
            if process.pid is not None:
                os.kill(process.pid, number)

    def _reap(self) -> None:
        """Collect processes that have exited, and schedule their restarts."""
        for process in self._processes:
            if process.pid is None:
                continue
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if not pid:
                continue
            process.pid = None
            if process.channel is not None:
                process.channel.close()
                process.channel = None
            if self._stop_signal is not None or self._has_failed:
                continue
            if not self.was_ready:
                self._has_failed = True
                self._send_signal(signal.SIGTERM)
                continue
            code = os.waitstatus_to_exitcode(status)
            cause = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            self._schedule_restart(process, f"pid={pid}, {cause}")

    def _schedule_restart(self, process: SupervisedProcess, cause: str) -> None:
        now = effects.now()
        is_early = now - process.started_at < _EARLY_EXIT_S
        process.early_exits = process.early_exits + 1 if is_early else 1
        delay_s = restart_delay_s(process.early_exits)
        process.restart_at = now + delay_s
        if delay_s:
            process.close_listeners()
        _logger.error("process exited, %s; restarting in %g s", cause, delay_s)

    @contextmanager
    def _capture_signals(self) -> Generator[socket.socket]:
        """Collect signals in `_pending_signals`; yield a socket that is readable after a signal."""
        read_end, write_end = socket.socketpair()
        read_end.settimeout(0)
        write_end.settimeout(0)
        old_handlers = {
            number: signal.signal(
                number, lambda number, _frame: self._pending_signals.append(number)
            )
            for number in _STOP_SIGNALS
        }
        # Without a handler, SIGCHLD would not write to the wakeup socket.
        old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        old_descriptor = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        try:
            yield read_end
        finally:
            signal.set_wakeup_fd(old_descriptor)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
            read_end.close()
            write_end.close()


def _bind(host: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Return a bound socket for each address of a host. Raises OSError."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port, *address[2:]))
            port = listener.getsockname()[1]  # if it was 0: the same port for all addresses
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners
