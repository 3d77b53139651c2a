"""A shop enqueues webhooks in the retry service, and their receiver fails at first.

Run it: `python examples/webhooks.py`. It needs `pip install 'tarry[service]'`. It starts a service
in a temporary folder; in production the service already runs.
"""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tarry

keys: list[str] = []


class Receiver(BaseHTTPRequestHandler):
    """Responds with 503 twice and then with 200, and on `/gone` always with 410."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/gone":
            status = 410
        else:
            keys.append(self.headers["Idempotency-Key"])
            status = 503 if len(keys) <= 2 else 200
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        """Log nothing."""


@contextmanager
def run_receiver() -> Generator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@contextmanager
def run_service() -> Generator[str]:
    command = [sys.executable, "-m", "tarry", "serve", "--dev", "--port", "0"]
    command += ["--set", "log_level=error"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[2]  # the line is "tarry serves URL ..."
        finally:
            process.terminate()


def send_webhook(client: tarry.Client, target: str, event: dict[str, object]) -> None:
    task = client.enqueue(target, event, key=f"{event['type']}-{event['order']}", policy="shop")
    print(f"{event['type']}: the service has it, as {task.idempotency_key}")
    task = client.wait(task, timeout=60)
    print(f"  {task.status}, attempts: {task.attempt_number}")
    for step in client.explain(task).steps:
        print(f"  {step.text}")


with run_receiver() as target, run_service() as address, tarry.Client(address) as client:
    client.put_policy("shop", tarry.Policy(max_attempts=4, initial_delay=0.1, jitter="none"))
    send_webhook(client, f"{target}/hooks", {"type": "paid", "order": 7})
    send_webhook(client, f"{target}/gone", {"type": "sent", "order": 7})
    print("the receiver saw", len(keys), "requests with", *set(keys))
