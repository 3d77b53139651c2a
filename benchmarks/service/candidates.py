"""The candidates of the job. The peers have the fastest settings found in a search.

The search ran on two cores; other settings may be faster on another machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.service.processes import ROOT, BenchmarkError
from benchmarks.service.tarry_server import SERVE_COMMAND

Command = tuple[str, ...]

BARE_LOOP, TARRY_SINGLE, TARRY_BATCH = "bare-loop", "tarry", "tarry-batch"
TARRY_TWO_PROCESSES, TARRY_BATCH_TWO_PROCESSES = "tarry-2-processes", "tarry-batch-2-processes"
CLIENT, CLIENT_THREADS, CLIENT_BATCH = "client", "client-threads", "client-batch"
"""The candidates that are not peers. `bare-loop`, a client without a queue, shows the highest rate
that the machine allows. The last three candidates use tarry's own clients."""
OTHER_STORES = {
    f"tarry-{server}{suffix}": server
    for server in ("postgres", "redis")
    for suffix in ("", "-batch", "-2-processes", "-batch-2-processes")
}
"""tarry with its store in a server: single tasks and batches, with one and two processes. They are
compared only with the peers that use the same server."""
NODE_SOURCES = Path(__file__).with_name("node")
NODE_INSTALL = ROOT / ".venv" / "bench-node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The processes with which a candidate does the job."""

    enqueuer: Command
    workers: tuple[Command, ...] = ()
    set_up: Command = ()
    server: str = ""
    """The server that it needs: `redis`, `postgres` or none."""
    processes: int = 1
    """Number of processes of `tarry serve`."""
    warm_up_tasks: int = 4_000
    """Enough for V8 to compile the code of the peers on Node, and for the limiter in each of two
    processes of tarry to find that a fifth of the attempts fail at every rate: it first tries lower
    rates."""
    packages: Path | None = None
    """A folder with packages for this candidate only."""


def _peer_module(name: str, *role: str) -> Command:
    return (sys.executable, "-m", f"benchmarks.service.peers.{name}", *role)


def tarry_enqueuer(*, batch: bool = False, processes: int = 1) -> Command:
    """Return the command that adds the tasks of the job to `tarry serve`."""
    return _peer_module("tarry", "batch" if batch else "single", str(processes))


def tarry_candidate(*, processes: int = 1, batch: bool = False, server: str = "") -> Candidate:
    """Return the candidate of tarry with processes that both accept and deliver tasks."""
    return Candidate(
        enqueuer=tarry_enqueuer(batch=batch, processes=processes),
        workers=((*SERVE_COMMAND, "--workers", str(processes)),),
        server=server,
        processes=processes,
    )


def _python_module(*arguments: str) -> Command:
    return (sys.executable, "-m", *arguments)


def _node_script(name: str, role: str) -> Command:
    return ("node", str(NODE_SOURCES / f"{name}.js"), role)


_PEERS = "benchmarks.service.peers"
_CELERY = _python_module(
    *("celery", "-A", f"{_PEERS}.celery", "worker", "-P", "gevent", "-c", "50", "-l", "ERROR"),
    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
)
_DRAMATIQ = ("dramatiq", f"{_PEERS}.dramatiq", "-p", "4", "-t", "8", "--skip-logging")
_HUEY = ("huey.bin.huey_consumer", f"{_PEERS}.huey.queue", "-w", "8", "-k", "thread")
_TASKIQ = ("taskiq", "worker", f"{_PEERS}.taskiq:broker", "-w", "2", "--max-async-tasks", "100")
_TASKIQ_SCHEDULER = ("taskiq", "scheduler", f"{_PEERS}.taskiq:scheduler", "--update-interval", "1")

CANDIDATES = {
    BARE_LOOP: Candidate(enqueuer=_peer_module("bare")),
    TARRY_SINGLE: tarry_candidate(),
    TARRY_BATCH: tarry_candidate(batch=True),
    TARRY_TWO_PROCESSES: tarry_candidate(processes=2),
    TARRY_BATCH_TWO_PROCESSES: tarry_candidate(processes=2, batch=True),
    **{
        name: Candidate(enqueuer=_peer_module("tarry", name), workers=(SERVE_COMMAND,))
        for name in (CLIENT, CLIENT_THREADS, CLIENT_BATCH)
    },
    **{
        name: tarry_candidate(
            processes=2 if name.endswith("-2-processes") else 1,
            batch="-batch" in name,
            server=server,
        )
        for name, server in OTHER_STORES.items()
    },
    "celery": Candidate(
        enqueuer=_peer_module("celery"),
        workers=((*_CELERY, "-n", "one@here"), (*_CELERY, "-n", "two@here")),
        server="redis",
    ),
    "dramatiq": Candidate(
        enqueuer=_peer_module("dramatiq"), workers=(_python_module(*_DRAMATIQ),), server="redis"
    ),
    "arq": Candidate(
        enqueuer=_peer_module("arq"),
        workers=(_peer_module("arq", "work"),) * 2,
        server="redis",
        packages=Path(sys.prefix) / "arq",
    ),
    "taskiq": Candidate(
        enqueuer=_peer_module("taskiq"),
        workers=(
            _python_module(*_TASKIQ, "--log-level", "CRITICAL"),
            _python_module(*_TASKIQ_SCHEDULER, "--log-level", "CRITICAL"),
        ),
        server="redis",
    ),
    "saq": Candidate(
        enqueuer=_peer_module("saq"), workers=(_peer_module("saq", "work"),) * 2, server="redis"
    ),
    "pgqueuer": Candidate(
        set_up=_peer_module("pgqueuer", "set-up"),
        enqueuer=_peer_module("pgqueuer"),
        workers=(_peer_module("pgqueuer", "work"),) * 2,
        server="postgres",
    ),
    "procrastinate": Candidate(
        set_up=_peer_module("procrastinate", "set-up"),
        enqueuer=_peer_module("procrastinate"),
        workers=(_peer_module("procrastinate", "work"),),
        server="postgres",
    ),
    "huey": Candidate(
        enqueuer=_peer_module("huey"),
        workers=(_python_module(*_HUEY, "-d", "0.01", "-m", "0.1", "-q"),),
    ),
    "bullmq": Candidate(
        enqueuer=_node_script("bullmq", "enqueue"),
        workers=(_node_script("bullmq", "work"),) * 2,
        server="redis",
    ),
    "graphile-worker": Candidate(
        set_up=_node_script("graphile", "set-up"),
        enqueuer=_node_script("graphile", "enqueue"),
        workers=(_node_script("graphile", "work"),) * 2,
        server="postgres",
    ),
}


def is_peer(name: str) -> bool:
    return name not in {
        *(BARE_LOOP, TARRY_SINGLE, TARRY_BATCH, TARRY_TWO_PROCESSES, TARRY_BATCH_TWO_PROCESSES),
        *(CLIENT, CLIENT_THREADS, CLIENT_BATCH),
        *OTHER_STORES,
    }


def runs_on_node(name: str) -> bool:
    return CANDIDATES[name].enqueuer[0] == "node"


def install_node_peers() -> dict[str, str]:
    """Install the peers on Node; return the environment variables with which Node finds them."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise BenchmarkError("node and npm are not installed")
    manifest, expected = NODE_INSTALL / "package.json", (NODE_SOURCES / "package.json").read_text()
    if not manifest.exists() or manifest.read_text() != expected:
        shutil.rmtree(NODE_INSTALL, ignore_errors=True)
        NODE_INSTALL.mkdir(parents=True)
        manifest.write_text(expected)
        npm = ["npm", "install", "--no-audit", "--no-fund", "--legacy-peer-deps"]
        process = subprocess.run(npm, cwd=NODE_INSTALL, capture_output=True, text=True, check=False)
        if process.returncode:
            manifest.unlink()  # so that the next run tries again
            raise BenchmarkError(f"npm install failed:\n{process.stderr[-2000:]}")
    return {"NODE_PATH": str(NODE_INSTALL / "node_modules")}
