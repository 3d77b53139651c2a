"""Certificates and private keys in PEM files, which are loaded again when the files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_logger = logging.getLogger("tarry.service")
_ENCRYPTED = (
    "must not be encrypted: the service cannot ask for a passphrase. Decrypt it with "
    "`openssl pkey -in FILE -out NEW_FILE`, and protect it with file permissions"
)


class CertificateFiles:
    """A certificate with its intermediate certificates, and the private key, in PEM files.

    `fields` are the names of the two settings, for errors.
    """

    def __init__(
        self, cert_file: str, key_file: str, *, fields: tuple[str, str] = ("tls_cert", "tls_key")
    ) -> None:
        self._paths = Path(cert_file), Path(key_file)
        self._fields = fields
        self._loaded_state: object = None

    def __str__(self) -> str:
        return f"{self._paths[0]}"

    def has_changed(self) -> bool:
        """Return whether a file has changed since the last load, also if that load failed."""
        return self._loaded_state != self._read_state()

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load certificate and key, or raise ConfigurationError; then discard the context."""
        self._loaded_state = self._read_state()  # before the files are read: no change is missed
        certificate, key = (self._read(index) for index in range(2))
        if b"-----BEGIN CERTIFICATE-----" not in certificate:
            self._reject(0, "must be a file with a PEM certificate")
        if b"PRIVATE KEY-----" not in key:
            self._reject(1, "must be a file with a PEM private key")
        if b"ENCRYPTED" in key:
            self._reject(1, _ENCRYPTED)
        try:
            # Without the callback, OpenSSL would ask for a passphrase on the terminal.
            context.load_cert_chain(*self._paths, password=lambda: self._reject(1, _ENCRYPTED))
        except ssl.SSLError as error:
            reason = error.reason or "unknown error"
            if "MISMATCH" in reason:
                self._reject(1, f"must be the private key of the certificate in {self._paths[0]}")
            rule = f"or {self._fields[1]} is not valid: {reason.lower().replace('_', ' ')}"
            raise ConfigurationError(self._fields[0], rule, str(self._paths[0])) from None
        except OSError as error:  # a file was removed meanwhile
            self._reject(0, f"or {self._fields[1]} cannot be read: {error.strerror}")

    def read(self) -> tuple[bytes, bytes]:
        """Return certificate and key, or raise ConfigurationError if they are not valid."""
        self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return self._read(0), self._read(1)

    def _read(self, index: int) -> bytes:
        try:
            return self._paths[index].read_bytes()
        except OSError as error:
            self._reject(index, f"cannot be read: {error.strerror}")

    def _reject(self, index: int, rule: str) -> NoReturn:
        raise ConfigurationError(self._fields[index], rule, str(self._paths[index])) from None

    def _read_state(self) -> object:
        """Return a value that changes when a file is written or replaced."""
        state: list[object] = []
        for path in self._paths:
            try:
                status = path.stat()  # follows links: Kubernetes replaces a link to a folder
            except OSError:
                state.append(None)
            else:
                state.append((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size))
        return state


class ReloadingCertificate(Generic[T]):
    """A certificate in files, which is loaded again when the files have changed.

    `load` returns the loaded certificate, such as a TLS context, or raises ConfigurationError.
    `current` is what it has returned last. Connections that exist keep their certificate.
    """

    def __init__(self, files: CertificateFiles, load: Callable[[CertificateFiles], T]) -> None:
        self._files = files
        self._load = load
        self.current: T = load(files)

    def reload_if_changed(self) -> None:
        """Load the files again if they have changed. If they are not valid, log the reason.

        The previous certificate is used until valid files are there, for example while only one of
        two files has been replaced.
        """
        if not self._files.has_changed():
            return
        try:
            self.current = self._load(self._files)
        except ConfigurationError as error:
            message = "certificate was not loaded again, the previous one is used: %s"
            _logger.error(message, error)  # noqa: TRY400 - the trace is of no use
        else:
            _logger.warning("certificate loaded again, file=%s", self._files)


class ServerCertificate:
    """The TLS context of a server, whose new connections have the certificate loaded last."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        """Load the files, or raise ConfigurationError."""
        files = CertificateFiles(cert_file, key_file)
        self._reloading = ReloadingCertificate(files, _build_server_context)
        self.context: ssl.SSLContext = self._reloading.current
        self.context.sni_callback = self._select_certificate
        self.reload_if_changed: Callable[[], None] = self._reloading.reload_if_changed

    def _select_certificate(
        self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: ssl.SSLContext
    ) -> None:
        # OpenSSL calls this for each handshake, also without SNI. A context that is in use must not
        # be changed: if the files were not valid, it would lose its old certificate.
        connection.context = self._reloading.current


def _build_server_context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 or later
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    files.load_into(context)
    return context
