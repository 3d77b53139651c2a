"""The candidates of the job, each with the fastest settings found in a search.

The search ran on two cores; other settings may be faster on another machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.service.processes import ROOT, Failed
from benchmarks.service.served import SERVE

Command = tuple[str, ...]

LIMIT, SINGLES, BATCHES = "bare-loop", "tarry", "tarry-batch"
"""The upper limit (a client without a queue), and tarry's two candidates; others are peers."""
NODE = Path(__file__).with_name("node")
NODE_HOME = ROOT / ".venv" / "bench-node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The processes with which a candidate does the job."""

    enqueuer: Command
    workers: tuple[Command, ...] = ()
    set_up: Command = ()
    needs: str = ""
    """The server that it needs: `redis`, `postgres` or none."""
    packages: Path | None = None
    """A folder with packages for this candidate only."""


def _peer(name: str, *role: str) -> Command:
    return (sys.executable, "-m", f"benchmarks.service.peers.{name}", *role)


def _command(*words: str) -> Command:
    return (sys.executable, "-m", *words)


def _node(name: str, role: str) -> Command:
    return ("node", str(NODE / f"{name}.js"), role)


_PEERS = "benchmarks.service.peers"
_CELERY = _command(
    *("celery", "-A", f"{_PEERS}.celery", "worker", "-P", "gevent", "-c", "50", "-l", "ERROR"),
    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
)
_DRAMATIQ = ("dramatiq", f"{_PEERS}.dramatiq", "-p", "4", "-t", "8", "--skip-logging")
_HUEY = ("huey.bin.huey_consumer", f"{_PEERS}.huey.queue", "-w", "8", "-k", "thread")
_TASKIQ = ("taskiq", "worker", f"{_PEERS}.taskiq:broker", "-w", "2", "--max-async-tasks", "100")
_TASKIQ_SCHEDULER = ("taskiq", "scheduler", f"{_PEERS}.taskiq:scheduler", "--update-interval", "1")

CANDIDATES = {
    LIMIT: Candidate(enqueuer=_peer("bare")),
    SINGLES: Candidate(enqueuer=_peer("tarry"), workers=(SERVE,)),
    BATCHES: Candidate(enqueuer=_peer("tarry", "batch"), workers=(SERVE,)),
    "celery": Candidate(
        enqueuer=_peer("celery"),
        workers=((*_CELERY, "-n", "one@here"), (*_CELERY, "-n", "two@here")),
        needs="redis",
    ),
    "dramatiq": Candidate(
        enqueuer=_peer("dramatiq"), workers=(_command(*_DRAMATIQ),), needs="redis"
    ),
    "arq": Candidate(
        enqueuer=_peer("arq"),
        workers=(_peer("arq", "work"),) * 2,
        needs="redis",
        packages=Path(sys.prefix) / "arq",
    ),
    "taskiq": Candidate(
        enqueuer=_peer("taskiq"),
        workers=(
            _command(*_TASKIQ, "--log-level", "CRITICAL"),
            _command(*_TASKIQ_SCHEDULER, "--log-level", "CRITICAL"),
        ),
        needs="redis",
    ),
    "saq": Candidate(enqueuer=_peer("saq"), workers=(_peer("saq", "work"),) * 2, needs="redis"),
    "pgqueuer": Candidate(
        set_up=_peer("pgqueuer", "set-up"),
        enqueuer=_peer("pgqueuer"),
        workers=(_peer("pgqueuer", "work"),) * 2,
        needs="postgres",
    ),
    "procrastinate": Candidate(
        set_up=_peer("procrastinate", "set-up"),
        enqueuer=_peer("procrastinate"),
        workers=(_peer("procrastinate", "work"),),
        needs="postgres",
    ),
    "huey": Candidate(
        enqueuer=_peer("huey"), workers=(_command(*_HUEY, "-d", "0.01", "-m", "0.1", "-q"),)
    ),
    "bullmq": Candidate(
        enqueuer=_node("bullmq", "enqueue"), workers=(_node("bullmq", "work"),), needs="redis"
    ),
    "graphile-worker": Candidate(
        set_up=_node("graphile", "set-up"),
        enqueuer=_node("graphile", "enqueue"),
        workers=(_node("graphile", "work"),),
        needs="postgres",
    ),
}


def is_peer(name: str) -> bool:
    return name not in {LIMIT, SINGLES, BATCHES}


def on_node(name: str) -> bool:
    return CANDIDATES[name].enqueuer[0] == "node"


def install_node_peers() -> dict[str, str]:
    """Install the peers on Node; return the environment variables with which Node finds them."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Failed("node and npm are not installed")
    manifest, wanted = NODE_HOME / "package.json", (NODE / "package.json").read_text()
    if not manifest.exists() or manifest.read_text() != wanted:
        shutil.rmtree(NODE_HOME, ignore_errors=True)
        NODE_HOME.mkdir(parents=True)
        manifest.write_text(wanted)
        npm = ["npm", "install", "--no-audit", "--no-fund", "--legacy-peer-deps"]
        process = subprocess.run(npm, cwd=NODE_HOME, capture_output=True, text=True, check=False)
        if process.returncode:
            manifest.unlink()  # so that the next run tries again
            raise Failed(f"npm install failed:\n{process.stderr[-2000:]}")
    return {"NODE_PATH": str(NODE_HOME / "node_modules")}
