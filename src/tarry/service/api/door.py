"""Who may ask: the tenant whose key a request carries, and only what was meant for this service."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING

from tarry.service.api import problems
from tarry.service.api.keys import DEFAULT_TENANT, Keys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from tarry.service.api.exchange import Asked
    from tarry.service.api.surroundings import Surroundings


class Door:
    """Lets in who has a key, or everybody as one tenant where none is demanded."""

    def __init__(self, around: Surroundings) -> None:
        self._keys = Keys(around.store, around.monotonic)
        self.tenant_of: Callable[[Asked], Awaitable[str] | str] | str = (
            self._tenant_of if around.keys else DEFAULT_TENANT
        )
        """Returns the tenant of a request; where no key is needed, all have the same."""
        self.check_host: Callable[[dict[bytes, bytes]], None] | None = (
            None if around.hosts is None else Hosts(around.hosts).check
        )

    def _tenant_of(self, asked: Asked) -> Awaitable[str] | str:
        secret, other = _secrets(asked.fields)
        if other is not None and other != secret:
            raise problems.unauthorized("Authorization and X-API-Key differ: send one key.")
        if secret is None:
            detail = "Send `Authorization: Bearer KEY`, or `X-API-Key: KEY`."
            raise problems.unauthorized(detail)
        return self._keys.believed(secret) or self._look_up(secret)

    async def _look_up(self, secret: str) -> str:
        tenant = await self._keys.tenant_of(secret)
        if tenant is None:
            raise problems.unauthorized("The API key is not known, or was revoked.")
        return tenant


class Hosts:
    """The names of this service, beside those of loopback.

    Without keys, a page in a browser could let its own name point to loopback and then read what
    is here (DNS rebinding). It cannot send another `Host` than that name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(map(_name_in, names))
        self._last: bytes | None = None
        """The one that was last found to be ours, for it will come again."""

    def check(self, fields: dict[bytes, bytes]) -> None:
        """Refuse a request to another host; one without a `Host` is of no browser."""
        host = fields.get(b"host")
        if host is None or host == self._last:
            return
        said = host.decode("latin-1")
        name = _name_in(said)
        if name not in self._names and not _is_loopback(name):
            raise problems.misdirected(said[:100])
        self._last = host


def _name_in(host: str) -> str:
    """Return the name or address in a `Host`, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    if host.count(":") == 1:  # else it is an IPv6 address without brackets
        host = host.partition(":")[0]
    return host.removesuffix(".").lower()


def _is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _secrets(fields: dict[bytes, bytes]) -> tuple[str | None, str | None]:
    """Return the key of a request, and the one that it carries besides."""
    key = fields.get(b"x-api-key")
    other = None if key is None else key.strip().decode("latin-1")
    line = fields.get(b"authorization")
    if line is None:
        return other, None
    scheme, _, rest = line.partition(b" ")
    return (rest.strip().decode("latin-1") if scheme.lower() == b"bearer" else None), other
