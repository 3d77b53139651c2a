"""`GET /whoami`: the tenant and the role of the caller's API key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.api.messages import NoQuery, json_response
from tarry.service.api.routing import Operation
from tarry.wire.tasks import Caller

if TYPE_CHECKING:
    from tarry.service.api.auth import Authenticator
    from tarry.service.api.messages import ApiRequest, ApiResponse


class CallerResource:
    """The operation that describes the caller."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    @Operation("GET", "/whoami", "getCaller", Caller)
    async def get_caller(self, request: ApiRequest) -> ApiResponse:
        """Get the tenant and the role of your API key."""
        request.parse_query(NoQuery)
        role = await self._authenticator.find_role(request)
        return json_response(200, Caller(tenant=request.tenant, role=role.label))
