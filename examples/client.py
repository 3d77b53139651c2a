"""An httpx client with retries, a breaker and a budget, and a server that needs them.

Run it: `python examples/client.py`. It needs `pip install 'tarry[httpx]'`.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

import tarry
from tarry.adapters.httpx import RetryTransport

logging.getLogger("tarry").setLevel(logging.ERROR)  # otherwise each retry is logged


class Shop(BaseHTTPRequestHandler):
    """Responds with the next status of the script, and with 200 when the script is empty."""

    protocol_version = "HTTP/1.1"
    script: list[int] = []  # noqa: RUF012 - shared by all requests
    keys: list[str | None] = []  # noqa: RUF012 - shared by all requests

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        Shop.keys.append(self.headers.get("idempotency-key"))
        self.send_response(Shop.script.pop(0) if Shop.script else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def run_shop() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shop)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def build_downstream(origin: str) -> tarry.Downstream:
    """Return a downstream with its own breaker and budget; called once for each origin."""
    breaker = tarry.Breaker(consecutive=5, open_for=0.2)
    return tarry.Downstream(origin, breaker=breaker, budget=tarry.TokenBudget())


transport = RetryTransport(
    policy=tarry.Policy(initial_delay=0.01),
    downstream=build_downstream,
    idempotency_key="auto",
)

with run_shop() as url, httpx.Client(base_url=url, transport=transport, trust_env=False) as client:
    Shop.script = [503, 502]
    print("GET:", client.get("/prices").status_code, "with", len(Shop.keys), "requests")

    Shop.script, Shop.keys = [503], []
    client.post("/orders", json={"item": 7})
    print("POST:", len(Shop.keys), "requests,", len(set(Shop.keys)), "key")

    Shop.script, Shop.keys = [500] * 100, []
    for _ in range(3):
        try:
            print("down:", client.get("/prices").status_code, "with", len(Shop.keys), "requests")
        except tarry.BreakerOpen as error:
            print("down:", type(error).__name__, "with", len(Shop.keys), "requests")
            back_at = error.retry_after or 0.0

    Shop.script = []
    time.sleep(back_at)
    print("back:", client.get("/prices").status_code)
