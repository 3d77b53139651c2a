"""Who asks: the tenant whose key a request carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.api import problems
from tarry.service.api.keys import DEFAULT_TENANT, Keys

if TYPE_CHECKING:
    from tarry.service.api.exchange import Asked
    from tarry.service.api.surroundings import Surroundings


class Door:
    """Lets in who has a key, or everybody as one tenant where none is demanded."""

    def __init__(self, around: Surroundings) -> None:
        self._keys = Keys(around.store, around.monotonic) if around.keys else None

    async def tenant_of(self, asked: Asked) -> str:
        """Return the tenant of a request."""
        if self._keys is None:
            return DEFAULT_TENANT
        secret = _secret(asked.fields)
        if secret is None:
            detail = "Send `Authorization: Bearer KEY`, or `X-API-Key: KEY`."
            raise problems.unauthorized(detail)
        tenant = await self._keys.tenant_of(secret)
        if tenant is None:
            raise problems.unauthorized("The API key is not known, or was revoked.")
        return tenant


def _secret(fields: dict[bytes, bytes]) -> str | None:
    line = fields.get(b"authorization")
    if line is not None:
        scheme, _, rest = line.partition(b" ")
        return rest.strip().decode("latin-1") if scheme.lower() == b"bearer" else None
    key = fields.get(b"x-api-key")
    return None if key is None else key.strip().decode("latin-1")
