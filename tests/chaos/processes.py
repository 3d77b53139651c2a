"""Several processes of `tarry serve` on one store, which faults kill, suspend and disturb."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.chaos.stores import ChaosStore
from tests.chaos.tcp_proxy import TcpProxy, tcp_proxy
from tests.integration.service import Service

LEASE_S = 6.0
SHORT_LEASES = ("max_attempt_timeout_ms=1000", f"lease_ms={LEASE_S * 1000:.0f}")
CLOCK_OFFSET_S = 3600
_WRONG_CLOCK = f"""
import time
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + {CLOCK_OFFSET_S}
time.time_ns = lambda: _time_ns() + {CLOCK_OFFSET_S} * 10**9
"""


class ServiceProcesses:
    """Some processes that accept tasks, and two that deliver them.

    The first worker uses the store through a proxy, if the store has one server. The clock of the
    second worker is an hour ahead.
    """

    def __init__(self, folder: Path, store: ChaosStore, *settings: str, api_count: int) -> None:
        self.store = store
        self.proxy: TcpProxy | None = None
        self._stack = ExitStack()
        flags = [flag for setting in settings for flag in ("--set", setting)]
        worker_urls = [store.url, store.url]
        if store.socket_path is not None:
            self.proxy = self._stack.enter_context(tcp_proxy(store.socket_path))
            worker_urls[0] = store.proxied_url(self.proxy.port)

        def create(name: str, role: str, url: str, *command_prefix: str) -> Service:
            (folder / name).mkdir()
            return Service(
                folder / name,
                *("--role", role, *flags),
                store=url,
                command_prefix=command_prefix,
            )

        (folder / "sitecustomize.py").write_text(_WRONG_CLOCK)
        wrong_clock = ("env", f"PYTHONPATH={folder}")
        self.apis = [create(f"api-{n}", "api", store.url) for n in range(api_count)]
        self.workers = [
            create("worker-0", "worker", worker_urls[0]),
            create("worker-1", "worker", worker_urls[1], *wrong_clock),
        ]

    @property
    def all(self) -> list[Service]:
        """All processes."""
        return [*self.apis, *self.workers]

    def start(self) -> None:
        """Start all processes."""
        for process in self.all:
            process.launch()
        for process in self.all:
            process.wait_until_ready()

    def close(self) -> None:
        """Kill all processes."""
        for process in self.all:
            if process.is_running:
                os.kill(process.process.pid, signal.SIGCONT)
                process.kill()
        self._stack.close()

    def restart_by_kill(self, process: Service) -> None:
        """Kill a process, and start it again."""
        process.kill()
        process.start()

    @contextmanager
    def suspended(self, process: Service) -> Iterator[None]:
        """Suspend a process at least until its leases have expired."""
        expired_at = time.monotonic() + LEASE_S + 1
        process.process.send_signal(signal.SIGSTOP)
        try:
            yield
            time.sleep(max(0.0, expired_at - time.monotonic()))
        finally:
            process.process.send_signal(signal.SIGCONT)


@contextmanager
def service_processes(
    folder: Path, store: ChaosStore, *settings: str, api_count: int
) -> Iterator[ServiceProcesses]:
    """Run the processes of the service."""
    processes = ServiceProcesses(folder, store, *settings, api_count=api_count)
    try:
        processes.start()
        yield processes
    finally:
        processes.close()
