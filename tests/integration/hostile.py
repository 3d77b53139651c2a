"""HTTP targets that violate the protocol or do not respond, one URL path per behaviour.

`with hostile_targets() as hostile:` runs the targets in a thread. `hostile.url` followed by a key
of BEHAVIOURS is the URL of a target, and `hostile.url` followed by "ok" is a valid target. The
target `hostile.closing_url` closes each connection without reading. `hostile.tls_urls` has HTTPS
targets with the certificates "good", "expired", "selfsigned" and "wronghost". `hostile.ca_file` has
the CA certificate, and `hostile.tls_contexts` has TLS contexts for other servers.
"""

from __future__ import annotations

import asyncio
import datetime
import gzip
import ipaddress
import ssl
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.connections import Connections

BOMB = gzip.compress(bytes(50 * 1024 * 1024))
METADATA_URL = "http://169.254.169.254/latest/meta-data/"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class ReceivedRequest(NamedTuple):
    """A request that a target has received."""

    method: str
    path: str
    head: str
    body: bytes


Behaviour = Callable[[asyncio.StreamWriter], Awaitable[None]]


def _respond_with(*parts: bytes) -> Behaviour:
    """Return a behaviour that sends some bytes and closes the connection."""

    async def behave(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return behave


def _repeat(first: bytes, part: bytes, pause: float = 0.0, times: int = 10**9) -> Behaviour:
    """Return a behaviour that sends `first`, and then `part` repeatedly."""

    async def behave(writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        for _ in range(times):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)

    return behave


async def _never(_: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


_HEAD = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BEHAVIOURS: dict[str, Behaviour] = {
    "never": _never,
    "drip": _repeat(_HEAD + b"Content-Length: 1000\r\n\r\n", b"x", 1.0),
    "dripping-headers": _repeat(_HEAD + b"X-Drip: ", b"x", 1.0),
    "endless": _repeat(_HEAD + b"\r\n", b"x" * 65536),
    "endless-500": _repeat(b"HTTP/1.1 500 No\r\n\r\n", b"x" * 65536),
    "endless-chunks": _repeat(_CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n"),
    "huge": _repeat(_HEAD + b"Content-Length: 999999999999\r\n\r\n", b"x" * 65536),
    "bomb": _respond_with(
        _HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB), BOMB
    ),
    "million-headers": _repeat(_HEAD, b"X-Line: value\r\n" * 1000, times=1000),
    "200-headers": _respond_with(_HEAD + b"X-Line: value\r\n" * 199 + b"Content-Length: 0\r\n\r\n"),
    "many-headers": _respond_with(
        _HEAD + b"X-Line: value\r\n" * 200 + b"Content-Length: 0\r\n\r\n"
    ),
    "endless-header": _repeat(_HEAD + b"X-Long: ", b"x" * 65536),
    "large-headers": _respond_with(
        _HEAD + (b"X-Long: " + b"x" * 50_000 + b"\r\n") * 2 + b"Content-Length: 0\r\n\r\n"
    ),
    "endless-100": _repeat(b"", b"HTTP/1.1 100 Continue\r\nX-Line: value\r\n\r\n"),
    "close-before-response": _respond_with(),
    "close-in-status": _respond_with(b"HTTP/1.1 20"),
    "close-in-headers": _respond_with(_HEAD + b"Content-Le"),
    "close-in-body": _respond_with(_HEAD + b"Content-Length: 100\r\n\r\nonly this"),
    "close-in-chunk": _respond_with(_CHUNKED + b"ff\r\nonly this"),
    "redirect": _respond_with(
        b"HTTP/1.1 302 Found\r\nLocation: "
        + METADATA_URL.encode()
        + b"\r\nContent-Length: 0\r\n\r\n"
    ),
    "http10": _respond_with(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nold"),
    "http09": _respond_with(b"<html>older</html>"),
    "continue": _respond_with(
        b"HTTP/1.1 100 Continue\r\nX-Interim: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n", OK
    ),
    "switching": _respond_with(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nxyz"),
    "bad-status": _respond_with(b"HTTP/1.1 abc OK\r\nContent-Length: 0\r\n\r\n"),
    "bad-version": _respond_with(b"HTTP/7.7 200 OK\r\nContent-Length: 0\r\n\r\n"),
    "not-http": _respond_with(b"SSH-2.0-OpenSSH_9.9\r\n"),
    "status-999": _respond_with(b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n"),
    "body-too-long": _respond_with(_HEAD + b"Content-Length: 2\r\n\r\nok and more than announced"),
    "two-lengths": _respond_with(_HEAD + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\nokxyz"),
    "bad-length": _respond_with(_HEAD + b"Content-Length: -5\r\n\r\nok"),
    "bad-chunks": _respond_with(_CHUNKED + b"zzzz\r\ngarbage\r\n"),
    "bad-encoding": _respond_with(_HEAD + b"Transfer-Encoding: sideways\r\n\r\nok"),
    "null-in-header": _respond_with(_HEAD + b"X-Null: a\x00b\r\nContent-Length: 0\r\n\r\n"),
    "no-colon": _respond_with(_HEAD + b"no colon here\r\nContent-Length: 0\r\n\r\n"),
    "trailers": _respond_with(
        _HEAD + b"X-Head: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Tail: 2\r\n\r\n"
    ),
    "bytes-in-header": _respond_with(_HEAD + b"X-Odd: \xff\xfe\r\nContent-Length: 0\r\n\r\n"),
    "second-response": _respond_with(OK + b"HTTP/1.1 500 Planted\r\nContent-Length: 3\r\n\r\nbad"),
    "endless-extension": _repeat(_CHUNKED + b"2;", b"x" * 65536),
    "endless-trailers": _repeat(_CHUNKED + b"0\r\n", b"X-Line: value\r\n" * 1000),
    "endless-short-headers": _repeat(_HEAD, b"a:\r\n" * 100, 0.001),
    "endless-lines": _repeat(b"", b"\r\n" * 10_000),
    "continue-then-nonsense": _respond_with(b"HTTP/1.1 100 Continue\r\n\r\nnonsense\r\n\r\n"),
    "length-and-chunks": _respond_with(
        _HEAD + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    ),
    "carriage-return": _respond_with(_HEAD + b"X-Odd: a\rX-Two: b\r\nContent-Length: 0\r\n\r\n"),
    "zipped-chunks": _respond_with(_HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
}
"""Behaviours after a request was read; then the connection is closed. "ok" keeps it open."""


class HostileTargets:
    """The targets, and the requests that they received."""

    def __init__(self, home: Path) -> None:
        self.received_requests: list[ReceivedRequest] = []
        self.connections = 0
        self.url = self.closing_url = ""
        self.tls_urls: dict[str, str] = {}
        self.ca_file = str(home / "ca.pem")
        self.tls_contexts = make_certificates(home)
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start a thread that serves."""
        self._thread.start()
        self._started.wait(30)

    def stop(self) -> None:
        """Close the ports."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        connections = Connections(self._respond)
        plain = await asyncio.start_server(connections.accept, "127.0.0.1", 0)
        closing = await asyncio.start_server(self._close_at_once, "127.0.0.1", 0)
        servers = [plain, closing]
        self.url = f"http://127.0.0.1:{_port(plain)}/"
        self.closing_url = f"http://127.0.0.1:{_port(closing)}/"
        for kind, context in self.tls_contexts.items():
            server = await asyncio.start_server(connections.accept, "127.0.0.1", 0, ssl=context)
            servers.append(server)
            self.tls_urls[kind] = f"https://127.0.0.1:{_port(server)}/"
        self._started.set()
        await self._stopping.wait()
        for server in servers:
            server.close()
        await connections.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _close_at_once(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                name = await self._read_request(reader)
                if name != "ok":
                    await BEHAVIOURS[name](writer)
                    break
                writer.write(OK)
        except (OSError, KeyError, asyncio.IncompleteReadError):
            pass  # an unknown path, or a closed connection

    async def _read_request(self, reader: asyncio.StreamReader) -> str:
        """Read a request and return the name of the requested behaviour."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        lengths = [line[15:] for line in head.lower().splitlines() if line.startswith("content-le")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        self.received_requests.append(ReceivedRequest(method, path, head, body))
        return path.partition("?")[0].strip("/")


def _port(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


def make_certificates(home: Path) -> dict[str, ssl.SSLContext]:
    """Write a CA to `home`/ca.pem; return a server TLS context for each kind of certificate."""
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    root_key = ec.generate_private_key(ec.SECP256R1())
    root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tarry test CA")])
    key_id = x509.SubjectKeyIdentifier.from_public_key(root_key.public_key())
    root = (
        x509.CertificateBuilder(root_name, root_name, root_key.public_key())
        .serial_number(1)
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(key_id, critical=False)
        .add_extension(_ca_key_usage(), critical=True)
        .sign(root_key, hashes.SHA256())
    )
    (home / "ca.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    contexts: dict[str, ssl.SSLContext] = {}
    for kind in ("good", "expired", "selfsigned", "wronghost", "localhost"):
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, kind)])
        names: list[x509.GeneralName] = [x509.DNSName("elsewhere.example")]
        if kind != "wronghost":
            names = [loopback, x509.DNSName("localhost")]
        is_self_signed = kind == "selfsigned"
        signer = key if is_self_signed else root_key
        signer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = (
            x509.CertificateBuilder(name if is_self_signed else root_name, name, key.public_key())
            .serial_number(2)
            .not_valid_before(now - 3 * day)
            .not_valid_after(now - day if kind == "expired" else now + day)
            .add_extension(signer_id, critical=False)  # required by Python 3.13
        )
        if kind != "localhost":  # it has its host name only as the common name
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(signer, hashes.SHA256())
        path = home / f"{kind}.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        contexts[kind] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        contexts[kind].load_cert_chain(path)
    return contexts


def _ca_key_usage() -> x509.KeyUsage:
    uses = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(**uses, key_cert_sign=True, crl_sign=True)


@contextmanager
def hostile_targets() -> Iterator[HostileTargets]:
    """Run the targets for the duration of a block."""
    with tempfile.TemporaryDirectory(prefix="tarry-") as home:
        hostile = HostileTargets(Path(home))
        hostile.start()
        try:
            yield hostile
        finally:
            hostile.stop()
