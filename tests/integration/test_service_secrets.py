"""A running service that sends secrets from files, commands and an OAuth 2 token endpoint."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import tarry
from tests.integration.service import service

CLIENT_SECRET = "client-secret-7"  # noqa: S105 - not used outside this test


class Partner:
    """A target that accepts one token, echoes the sent header, and has a token endpoint."""

    def __init__(self) -> None:
        self.accepted = "access-token-1"
        self.token_requests: list[str] = []
        self.sent: list[str] = []
        partner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                if self.path == "/token":
                    partner.token_requests.append(body)
                    token = {"access_token": partner.accepted, "token_type": "bearer"}
                    self._respond(200, json.dumps({**token, "expires_in": 3600}))
                    return
                sent = self.headers["x-token"] or self.headers["authorization"]
                partner.sent.append(sent)
                is_rejected = self.path == "/guarded" and sent != f"Bearer {partner.accepted}"
                status = 401 if is_rejected else 400 if self.path == "/echo" else 200
                self._respond(status, f"you sent {sent}")

            def _respond(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    @contextmanager
    def serve(self) -> Iterator[Partner]:
        """Serve until the block ends."""
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


def test_secrets_reach_the_target_and_nothing_else(tmp_path: Path) -> None:
    """Values come from file, command and token endpoint; store, log and API do not have them."""
    with Partner().serve() as partner:
        (tmp_path / "token").write_text("file-token-1\n")
        (tmp_path / "client").write_text(CLIENT_SECRET)
        settings = tmp_path / "tarry.toml"
        targets = f'targets = ["http:127.0.0.1:{partner.port}"]'
        settings.write_text(f"""
[[secrets]]
name = "from-file"
{targets}
header = "X-Token"
file = "{tmp_path / "token"}"

[[secrets]]
name = "from-command"
{targets}
header = "X-Token"
command = ["{sys.executable}", "-c", "print('command-' + 'token-1')"]
timeout_ms = 30000

[[secrets]]
name = "oauth"
{targets}
token_url = "{partner.url}/token"
client_id = "tarry"
client_secret_file = "{tmp_path / "client"}"
client_auth = "body"
""")
        shown: list[Any] = []
        flags = ("--config", str(settings), "--set", "log_level=debug")
        with (
            service(tmp_path, *flags) as running,
            tarry.Client(f"http://127.0.0.1:{running.port}") as client,
        ):

            def send(header: str, name: str, path: str) -> str:
                url = f"{partner.url}{path}"
                task = client.enqueue(url, b"{}", headers={header: {"secret": name}})
                assert {header: {"secret": name}} == task.headers
                task = client.wait(task, timeout=60)
                shown.extend([task, client.explain(task), *client.attempts(task)])
                return task.status

            assert "EXHAUSTED" == send("X-Token", "from-file", "/echo")
            assert "EXHAUSTED" == send("X-Token", "from-command", "/echo")
            assert "SUCCEEDED" == send("Authorization", "oauth", "/guarded")
            partner.accepted = "access-token-2"
            assert "SUCCEEDED" == send("Authorization", "oauth", "/guarded")
            text = repr(shown)
            files = [path for path in tmp_path.glob("tarry.db*") if path.is_file()]
            stored = b"".join(path.read_bytes() for path in files)
        assert [
            "file-token-1", "command-token-1", "Bearer access-token-1", "Bearer access-token-1",
            "Bearer access-token-2",
        ] == partner.sent  # fmt: skip
        assert 2 == len(partner.token_requests)
        assert f"client_secret={CLIENT_SECRET}" in partner.token_requests[0]
        assert "you sent [redacted]" in text
        assert b"from-file" in stored
        stored += (tmp_path / "log").read_bytes()
        for value in (*partner.sent, CLIENT_SECRET):
            assert value not in text
            assert value.encode() not in stored
