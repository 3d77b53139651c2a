"""Where the values of secrets come from: files, environment variables, commands, OAuth 2 tokens.

No error contains a value, the output of a command or the body of a token response, because errors
are logged.
"""

from __future__ import annotations

import asyncio
import os
import signal
from base64 import b64encode
from contextlib import suppress
from subprocess import DEVNULL, PIPE
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote_plus, urlencode

import msgspec

from tarry.errors import TarryError
from tarry.service.delivery import DeliveryRequest
from tarry.service.redaction import MIN_SECRET_LENGTH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from tarry.service.delivery import DeliveryResult

MAX_SECRET_BYTES = 16 << 10
"""The largest value of a secret. The headers of a task may have 32 KiB without their secrets."""
_FILE_LIFETIME_S = 1.0  # then the file is read again, because it may have changed
_TOKEN_TIMEOUT_S = 10.0
_MAX_TOKEN_RESPONSE_BYTES = 64 << 10
_DEFAULT_TOKEN_LIFETIME_S = 300.0
"""The lifetime of a token if the response has no `expires_in`, which RFC 6749 only recommends."""
_MIN_TOKEN_LIFETIME_S = 1.0  # a token that expires at once could never be used
_HTTP_OK = 200


class SecretUnavailable(TarryError):
    """The value of a secret cannot be obtained now; try again after `pause_s`."""

    def __init__(self, message: str, *, pause_s: float = 1.0) -> None:
        super().__init__(message)
        self.pause_s: float = pause_s


class SecretValue(msgspec.Struct, frozen=True):
    """A value that a source has returned. It must not be used for longer than `lifetime_s`."""

    text: str
    lifetime_s: float
    refresh_after_s: float
    """After this time, the next value is obtained in the background."""

    def __repr__(self) -> str:
        """Return the type alone: asyncio logs representations of results."""
        return "SecretValue(...)"


class SecretSource(Protocol):
    """Returns the current value of a secret."""

    is_renewable: bool
    """Whether `fetch` may return a new value after a target has rejected the last one (401)."""

    async def fetch(self) -> SecretValue:
        """Return the value, or raise SecretUnavailable."""
        ...


class EnvironmentSource:
    """The value of an environment variable of the service."""

    is_renewable = False

    def __init__(self, variable: str, environ: Mapping[str, str]) -> None:
        self._variable = variable
        self._environ = environ

    async def fetch(self) -> SecretValue:
        """Return the value of the variable."""
        text = self._environ.get(self._variable)
        if text is None:
            raise SecretUnavailable(f"the environment variable {self._variable} is not set")
        name = f"the environment variable {self._variable}"
        return SecretValue(_check_text(name, text.encode()), float("inf"), float("inf"))


class FileSource:
    """The content of a file, which is read again after a second."""

    is_renewable = False

    def __init__(self, path: Path) -> None:
        self._path = path

    async def fetch(self) -> SecretValue:
        """Return the content of the file, without blanks around it."""
        content = await asyncio.to_thread(self._read)
        text = _check_text(f"the file {self._path}", content)
        return SecretValue(text, _FILE_LIFETIME_S, _FILE_LIFETIME_S)

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_SECRET_BYTES + 1)
        except OSError as error:
            message = f"the file {self._path} cannot be read: {error.strerror}"
            raise SecretUnavailable(message) from None


class CommandSource:
    """The standard output of a command, without a shell; its error output is discarded."""

    is_renewable = True

    def __init__(self, command: Sequence[str], *, timeout_s: float, cache_s: float) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._cache_s = cache_s

    async def fetch(self) -> SecretValue:
        """Run the command and return its output, without blanks around it."""
        name, loop = f"the command {self._command[0]}", asyncio.get_running_loop()
        # Shielded: asyncio would end a command that is cancelled during its start, but not the
        # programs that the command has started.
        start = loop.create_task(
            loop.subprocess_exec(
                _OutputProtocol, *self._command,
                stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, start_new_session=True,
            )
        )  # fmt: skip
        try:
            transport, protocol = await asyncio.shield(start)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "its arguments are not valid"
            raise SecretUnavailable(f"{name} cannot be started: {reason}") from None
        except asyncio.CancelledError:
            with suppress(OSError, ValueError):
                await _end_command(*await start)
            raise
        try:
            async with asyncio.timeout(self._timeout_s):
                await protocol.done
        except TimeoutError:
            message = f"{name} has not ended within {self._timeout_s:g} s"
            raise SecretUnavailable(message) from None
        finally:
            status = transport.get_returncode()
            await _end_command(transport, protocol)
        if protocol.is_too_long:
            raise SecretUnavailable(f"the output of {name} is longer than {MAX_SECRET_BYTES} bytes")
        if status != 0:
            raise SecretUnavailable(f"{name} failed: its exit status is {status}")
        text = _check_text(f"the output of {name}", bytes(protocol.output))
        return SecretValue(text, self._cache_s, self._cache_s)


async def _end_command(transport: asyncio.SubprocessTransport, protocol: _OutputProtocol) -> None:
    """Kill a command that still runs, and the programs that it has started: they are its group."""
    if transport.get_returncode() is None:
        with suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        await protocol.exited
    transport.close()


class _OutputProtocol(asyncio.SubprocessProtocol):
    """Collects the output of a command. `done` is set at its end, or when it is too long."""

    def __init__(self) -> None:
        self.output: bytearray = bytearray()
        self.is_too_long: bool = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unfinished = {"process", "output"}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        del fd  # only standard output is a pipe
        if len(self.output) + len(data) > MAX_SECRET_BYTES:
            self.is_too_long = True
            self._unfinished.clear()
            self._check_done()
        else:
            self.output += data

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        del fd, exc
        self._unfinished.discard("output")
        self._check_done()

    def process_exited(self) -> None:
        self.exited.set_result(None)
        self._unfinished.discard("process")
        self._check_done()

    def _check_done(self) -> None:
        if not self._unfinished and not self.done.done():
            self.done.set_result(None)


class TokenEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An OAuth 2 token endpoint, and how a client authenticates to it."""

    url: str  # canonical, as `parse_target` returns it
    client_id: str
    scope: str = ""
    parameters: Mapping[str, str] = {}  # further parameters of the request, such as `audience`
    secret_in_body: bool = False  # not in `Authorization: Basic` (RFC 6749, 2.3.1)


class _TokenResponse(msgspec.Struct):
    """The response of a token endpoint (RFC 6749, 5.1)."""

    access_token: str
    token_type: str
    expires_in: float | None = None


class _TokenError(msgspec.Struct):
    """The error of a token endpoint (RFC 6749, 5.2)."""

    error: str


_decode_token = msgspec.json.Decoder(_TokenResponse, strict=False).decode
_decode_error = msgspec.json.Decoder(_TokenError).decode
_TOKEN_ERRORS = frozenset({
    "invalid_request", "invalid_client", "invalid_grant", "unauthorized_client",
    "unsupported_grant_type", "invalid_scope",
})  # fmt: skip


class TokenSource:
    """Access tokens of an OAuth 2 client (client credentials, RFC 6749, section 4.4)."""

    is_renewable = True

    def __init__(
        self,
        endpoint: TokenEndpoint,
        client_secret: SecretSource,
        send: Callable[[DeliveryRequest], Awaitable[DeliveryResult]],
        *,
        tenant: str,
    ) -> None:
        self._endpoint = endpoint
        self._client_secret = client_secret
        self._send = send
        self._tenant = tenant

    async def fetch(self) -> SecretValue:
        """Request a token. It is refreshed before it expires, by a tenth of its lifetime."""
        secret = (await self._client_secret.fetch()).text
        endpoint = self._endpoint
        fields = {"grant_type": "client_credentials"}
        if endpoint.scope:
            fields["scope"] = endpoint.scope
        fields |= endpoint.parameters
        headers = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        }
        if endpoint.secret_in_body:
            fields |= {"client_id": endpoint.client_id, "client_secret": secret}
        else:
            credentials = f"{quote_plus(endpoint.client_id)}:{quote_plus(secret)}".encode()
            headers["Authorization"] = f"Basic {b64encode(credentials).decode()}"
        result = await self._send(
            DeliveryRequest(
                tenant=self._tenant,
                url=endpoint.url,
                method="POST",
                headers=headers,
                body=urlencode(fields).encode(),
                timeout=_TOKEN_TIMEOUT_S,
                max_excerpt=_MAX_TOKEN_RESPONSE_BYTES,
            )
        )
        return _parse_token(result)


def _parse_token(result: DeliveryResult) -> SecretValue:
    """Return the token of a response, or raise SecretUnavailable."""
    if result.fault is not None:
        # The description of the fault is written by the delivery client, not by the endpoint.
        message = f"the token endpoint cannot be reached ({result.fault}): {result.error}"
        raise SecretUnavailable(message)
    if result.status != _HTTP_OK:
        message = f"the token endpoint responded with {result.status}"
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            code = _decode_error(result.excerpt).error
            # Only known codes are shown: another text could contain a credential.
            message += f" {code}" if code in _TOKEN_ERRORS else ""
        raise SecretUnavailable(message)
    try:
        response = _decode_token(result.excerpt)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = "the response of the token endpoint is not JSON with access_token and token_type"
        raise SecretUnavailable(message) from None
    if response.token_type.lower() != "bearer":
        raise SecretUnavailable("the token endpoint returned a token that is not a bearer token")
    lifetime_s = _DEFAULT_TOKEN_LIFETIME_S
    if response.expires_in is not None:
        # In this order, `max` returns the minimum also for NaN, which would never be usable.
        lifetime_s = max(_MIN_TOKEN_LIFETIME_S, response.expires_in)
    text = _check_text("the access token", response.access_token.encode())
    # Clocks are not compared: the lifetime is counted from the response. The last twentieth is not
    # used, because the target must still accept the token when the request arrives.
    return SecretValue(text, 0.95 * lifetime_s, 0.9 * lifetime_s)


def _check_text(name: str, value: bytes) -> str:
    """Return a value as text, if it can be sent in a header; raise SecretUnavailable otherwise."""
    text = value.decode("ascii", "replace").strip()
    if len(text) > MAX_SECRET_BYTES:
        raise SecretUnavailable(f"{name} is longer than {MAX_SECRET_BYTES} bytes")
    if len(text) < MIN_SECRET_LENGTH:
        # A shorter value could not be redacted in texts, because other words could contain it.
        rule = f"must have at least {MIN_SECRET_LENGTH} characters"
        raise SecretUnavailable(f"{name} {rule}, but has {len(text)}")
    if not (text.isascii() and text.isprintable()):
        raise SecretUnavailable(f"{name} must be one line of visible ASCII characters")
    return text
