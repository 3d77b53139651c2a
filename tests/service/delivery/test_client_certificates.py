"""Client certificates: presented to the targets of a tenant, and replaced when the files change."""

from __future__ import annotations

import asyncio
import socket
import ssl
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery import grpc as grpc_delivery
from tarry.service.delivery.client_certificates import ClientCertificate
from tarry.service.delivery.grpc import GrpcDeliveryClient
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tests.certificates import Authority, PemFiles, common_name
from tests.connections import Handler
from tests.service.delivery.harness import LOOPBACK_GUARD, LOOPS, new_request, use_loop
from tests.service.delivery.scripted_server import (
    read_request,
    run_proxy,
    run_server,
)

grpc: Any = import_module("grpc")
import_module("grpc.aio")


@pytest.fixture(autouse=True, params=LOOPS)
def _loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_loop(request.param, monkeypatch)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return a certificate authority, which servers and clients trust."""
    return Authority(tmp_path)


def server_context(authority: Authority, verify_mode: ssl.VerifyMode) -> ssl.SSLContext:
    """Return the TLS context of a server that verifies client certificates."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca_file)
    context.load_cert_chain(*authority.issue("server"))
    context.verify_mode = verify_mode
    return context


def certificate(
    files: PemFiles, tenant: str = "default", target: str = "https:127.0.0.1:*"
) -> ClientCertificate:
    """Return a client certificate of a tenant."""
    return ClientCertificate(str(files.cert), str(files.key), tenant=tenant, targets=[target])


def respond_with_name(*, then_close: bool) -> Handler:
    """Return a handler that responds with the common name of the client certificate."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = common_name(writer.get_extra_info("peercert")).encode()
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(name), name))
            if then_close:
                return

    return handler


async def test_target_gets_the_certificate_of_its_tenant(authority: Authority) -> None:
    """Tenants have different certificates and connections; other tenants have no certificate."""
    client = HttpDeliveryClient(
        LOOPBACK_GUARD,
        ca_file=str(authority.ca_file),
        client_certificates=[
            certificate(authority.issue("other"), target="https:other.example:443"),
            certificate(authority.issue("own")),
            certificate(authority.issue("shop"), tenant="shop"),
        ],
    )
    tls = server_context(authority, ssl.CERT_REQUIRED)
    async with run_server(respond_with_name(then_close=False), tls) as server:

        async def send(tenant: str) -> DeliveryResult:
            return await client.send(new_request(server.url, tenant=tenant))

        assert b"own" == (await send("default")).excerpt
        assert b"own" == (await send("default")).excerpt
        assert 1 == server.connections
        assert b"shop" == (await send("shop")).excerpt
        assert 2 == server.connections
        assert (await send("stranger")).fault in {Fault.RESET, Fault.TLS}
    await client.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_missing_certificate_is_reported(
    authority: Authority, version: ssl.TLSVersion
) -> None:
    """The error of the attempt has the alert of the target, also if it follows the handshake."""
    tls = server_context(authority, ssl.CERT_REQUIRED)
    tls.maximum_version = version

    def reject_client(listener: socket.socket) -> None:
        # Not asyncio, whose servers close the connection without an alert.
        accepted, _ = listener.accept()
        connection = tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        with pytest.raises(ssl.SSLError):
            connection.do_handshake()
        with socket.socket(fileno=connection.detach()) as raw_connection:
            while raw_connection.recv(4096):  # a close before would discard the alert
                pass

    client = HttpDeliveryClient(LOOPBACK_GUARD, ca_file=str(authority.ca_file))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
        rejection = asyncio.to_thread(reject_client, listener)
        result, _ = await asyncio.gather(client.send(new_request(url)), rejection)
    await client.close()
    assert Fault.TLS is result.fault
    assert "alert" in str(result.error)


async def test_new_connections_use_the_changed_certificate(authority: Authority) -> None:
    """After a change of the files, the next connection has the new certificate."""
    files = authority.issue("first")
    client = HttpDeliveryClient(
        LOOPBACK_GUARD, ca_file=str(authority.ca_file), client_certificates=[certificate(files)]
    )
    tls = server_context(authority, ssl.CERT_REQUIRED)
    async with run_server(respond_with_name(then_close=True), tls) as server:
        names = [(await client.send(new_request(server.url))).excerpt]
        files.replace_with(authority.issue("second"))
        names += [(await client.send(new_request(server.url))).excerpt]
        files.key.unlink()
        names += [(await client.send(new_request(server.url))).excerpt]
    assert [b"first", b"second", b"second"] == names
    await client.close()


async def test_proxy_does_not_get_the_certificate(authority: Authority, tmp_path: Path) -> None:
    """An egress proxy that asks for a certificate gets none; the target behind it gets one."""
    stranger = Authority(tmp_path, "stranger")

    # The proxy trusts another authority: with the certificate, its handshake would fail.
    proxy_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=stranger.ca_file)
    proxy_tls.load_cert_chain(*authority.issue("proxy"))
    proxy_tls.verify_mode = ssl.CERT_OPTIONAL
    tls = server_context(authority, ssl.CERT_REQUIRED)
    async with (
        run_server(respond_with_name(then_close=True), tls) as server,
        run_proxy(tls=proxy_tls) as (proxy, _),
    ):
        client = HttpDeliveryClient(
            LOOPBACK_GUARD,
            proxy=proxy.url,
            ca_file=str(authority.ca_file),
            client_certificates=[certificate(authority.issue("own"))],
        )
        result = await client.send(new_request(server.url))
        assert b"own" == result.excerpt, result.error
        await client.close()


def test_missing_file_is_reported(authority: Authority) -> None:
    """The client is not created, and the error has the setting and the file."""
    files = authority.issue("own")
    files.key.unlink()
    message = "^client_certificates: key_file cannot be read: No such file or directory, got"
    with pytest.raises(ConfigurationError, match=message):
        HttpDeliveryClient(LOOPBACK_GUARD, client_certificates=[certificate(files)])


class NameHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Returns the common name of the client certificate."""

    def service(self, _details: Any) -> Any:
        """Return a handler for any method."""

        async def handler(_message: bytes, context: Any) -> bytes:
            name: bytes = context.auth_context()["x509_common_name"][0]
            return name

        return grpc.unary_unary_rpc_method_handler(handler)


async def test_grpc_target_gets_the_certificate(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel of a tenant has its certificate, and is replaced when the files change."""
    monkeypatch.setattr(grpc_delivery, "_ADDRESS_TTL_S", 0.0)

    server_files, files = authority.issue("server"), authority.issue("first")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((NameHandler(),))
    credentials = grpc.ssl_server_credentials(
        [(server_files.key.read_bytes(), server_files.cert.read_bytes())],
        authority.ca_file.read_bytes(),
        require_client_auth=True,
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    target = f"grpcs:127.0.0.1:{port}"
    client = GrpcDeliveryClient(
        LOOPBACK_GUARD,
        ca_file=str(authority.ca_file),
        client_certificates=[certificate(files, target=target)],
    )
    url = f"grpcs://127.0.0.1:{port}/S/M"
    first = await client.send(new_request(url))
    assert ("OK", b"first") == (first.status, first.excerpt), first.error
    files.replace_with(authority.issue("second"))
    assert b"second" == (await client.send(new_request(url))).excerpt
    assert "UNAVAILABLE" == (await client.send(new_request(url, tenant="shop"))).status
    await client.close()
    await server.stop(0)
