"""Several processes of `tarry serve` on one store, which faults kill, suspend and disturb."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.chaos.stores import ChaosStore
from tests.chaos.tcp_proxy import Disturbance, tcp_proxy
from tests.chaos.test_store_faults import child_pids
from tests.integration.servers import is_running
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
_REDIRECTED_PORTS = """
import asyncio
_open_connection = asyncio.open_connection
def _redirect(host, port, **options):
    return _open_connection(host, {ports}.get(port, port), **options)
asyncio.open_connection = _redirect
"""


class ServiceProcesses:
    """Some services that accept tasks, and two workers that deliver them.

    The first worker uses the store through proxies, if the store has servers. The clock of the
    second worker is an hour ahead. A worker may be a supervisor with several processes.
    """

    def __init__(self, folder: Path, store: ChaosStore, *settings: str, api_count: int) -> None:
        self.store = store
        self._stack = ExitStack()
        flags = [flag for setting in settings for flag in ("--set", setting)]

        def create(name: str, role: str, url: str, start_code: str = "") -> Service:
            (folder / name).mkdir()
            (folder / name / "sitecustomize.py").write_text(start_code)
            return Service(
                folder / name,
                *("--role", role, *flags),
                store=url,
                command_prefix=("env", f"PYTHONPATH={folder / name}") if start_code else (),
            )

        self._proxies = [self._stack.enter_context(tcp_proxy(path)) for path in store.socket_paths]
        proxied_url, start_code = store.url, ""
        if self._proxies:
            address = store.proxied_address([proxy.port for proxy in self._proxies])
            proxied_url = address.url
            if address.redirected_ports:
                start_code = _REDIRECTED_PORTS.format(ports=address.redirected_ports)
        self.apis = [create(f"api-{n}", "api", store.url) for n in range(api_count)]
        self.workers = [
            create("worker-0", "worker", proxied_url, start_code),
            create("worker-1", "worker", store.url, _WRONG_CLOCK),
        ]
        self._worker_flags = self.workers[0].flags

    @property
    def all(self) -> list[Service]:
        """All services."""
        return [*self.apis, *self.workers]

    def start(self) -> None:
        """Start all services."""
        for process in self.all:
            process.launch()
        for process in self.all:
            process.wait_until_ready()

    def close(self) -> None:
        """Kill all services."""
        for process in self.all:
            if process.is_running:
                self._signal(process, signal.SIGCONT)
                self._kill(process)
        self._stack.close()

    def disturb(self, disturbance: Disturbance) -> None:
        """Disturb the connections of the first worker from now on."""
        for proxy in self._proxies:
            proxy.disturb(disturbance)

    def scale(self, worker: Service, count: int) -> None:
        """Stop a worker gracefully, and start it with this number of processes."""
        assert 0 == worker.stop()
        worker.flags = self._worker_flags
        if count > 1:
            worker.flags += ("--workers", str(count))
        worker.start()

    def restart_by_kill(self, process: Service) -> None:
        """Kill a service with all its processes, and start it again."""
        self._kill(process)
        process.start()

    def kill_supervised(self, worker: Service) -> bool:
        """Kill one process of a supervisor, if the worker is one; return whether it is."""
        pids = self._supervised_pids(worker)
        if not pids:
            return False
        with suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
        return True

    @contextmanager
    def suspended(self, process: Service) -> Iterator[None]:
        """Suspend a service at least until its leases have expired."""
        expired_at = time.monotonic() + LEASE_S + 1
        self._signal(process, signal.SIGSTOP)
        try:
            yield
            time.sleep(max(0.0, expired_at - time.monotonic()))
        finally:
            self._signal(process, signal.SIGCONT)

    def _supervised_pids(self, process: Service) -> list[int]:
        return child_pids(process.process.pid) if "--workers" in process.flags else []

    def _signal(self, process: Service, number: signal.Signals) -> None:
        for pid in (process.process.pid, *self._supervised_pids(process)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill(self, process: Service) -> None:
        supervised_pids = self._supervised_pids(process)
        process.kill()
        for pid in supervised_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(map(is_running, supervised_pids)):  # until then, they use the port
            time.sleep(0.01)


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
