"""Certificates in files: clear errors, and the certificate of new connections after a change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError
from tarry.service.certificates import CertificateFiles, ServerCertificate
from tests.certificates import Authority, PemFiles, common_name


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return a certificate authority."""
    return Authority(tmp_path)


def handshake(server: ServerCertificate, authority: Authority) -> str:
    """Make a TLS connection in memory; return the common name of the server."""
    client_context = ssl.create_default_context(cafile=authority.ca_file)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname="localhost")
    connection = server.context.wrap_bio(to_server, to_client, server_side=True)
    pending = [client, connection]
    while pending:
        for side in list(pending):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            pending.remove(side)
    return common_name(client.getpeercert())


def test_new_connections_have_the_certificate_that_was_loaded_last(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Files are only loaded again after a change."""
    files = authority.issue("first")
    server = ServerCertificate(str(files.cert), str(files.key))
    server.reload_if_changed()
    assert "first" == handshake(server, authority)
    files.replace_with(authority.issue("second"))
    assert "first" == handshake(server, authority)
    server.reload_if_changed()
    server.reload_if_changed()
    assert "second" == handshake(server, authority)
    assert [f"certificate loaded again, file={files.cert}"] == caplog.messages


def test_invalid_files_do_not_replace_a_certificate(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """While certificate and key do not match, the previous certificate is used; logged once."""
    files, new = authority.issue("first"), authority.issue("second")
    server = ServerCertificate(str(files.cert), str(files.key))
    files.cert.write_bytes(new.cert.read_bytes())
    with caplog.at_level(logging.ERROR):
        server.reload_if_changed()
        server.reload_if_changed()
    [message] = caplog.messages
    assert "the previous one is used: tls_key must be the private key of" in message
    assert "first" == handshake(server, authority)
    files.key.unlink()
    server.reload_if_changed()
    assert "first" == handshake(server, authority)
    files.key.write_bytes(new.key.read_bytes())
    server.reload_if_changed()
    assert "second" == handshake(server, authority)


def load_error(files: PemFiles) -> str:
    """Return the error of files that cannot be loaded."""
    with pytest.raises(ConfigurationError) as caught:
        CertificateFiles(str(files.cert), str(files.key)).load_into(
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        )
    return str(caught.value)


def test_missing_files_are_reported(authority: Authority) -> None:
    """The error has the setting, the reason and the file."""
    files = authority.issue("server")
    files.key.unlink()
    assert load_error(files).startswith("tls_key cannot be read: No such file or directory, got")
    files.cert.unlink()
    files.cert.mkdir()
    assert load_error(files).startswith("tls_cert cannot be read: Is a directory, got")


def test_files_without_certificate_or_key_are_reported(authority: Authority) -> None:
    """Certificate and key that were exchanged are found, too."""
    files = authority.issue("server")
    exchanged = load_error(PemFiles(files.key, files.cert))
    assert exchanged.startswith("tls_cert must be a file with a PEM certificate, got")
    no_key = load_error(PemFiles(files.cert, files.cert))
    assert no_key.startswith("tls_key must be a file with a PEM private key, got")


def test_encrypted_key_is_reported(authority: Authority) -> None:
    """The service does not ask for a passphrase on the terminal."""
    files = authority.issue("server", passphrase=b"secret")
    assert load_error(files).startswith("tls_key must not be encrypted: ")


def test_key_of_another_certificate_is_reported(authority: Authority) -> None:
    """The error names both files."""
    files, other = authority.issue("server"), authority.issue("other")
    message = f"tls_key must be the private key of the certificate in {files.cert}, got"
    assert load_error(PemFiles(files.cert, other.key)).startswith(message)


def test_damaged_certificate_is_reported(authority: Authority) -> None:
    """The error has the reason of OpenSSL."""
    files = authority.issue("server")
    lines = files.cert.read_text().splitlines()
    files.cert.write_text("\n".join([lines[0], "AAAA", *lines[3:]]))
    assert load_error(files).startswith("tls_cert or tls_key is not valid: ")
