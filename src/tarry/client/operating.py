"""The calls about policies, downstreams and the service itself as requests. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tarry.client.errors import ServiceError
from tarry.client.newtask import written
from tarry.client.paths import identified, named, page, repeatable
from tarry.client.request import Answer, Manner, Request, decoded, nothing, problem_of
from tarry.client.whole import is_whole
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.wire.policies import policy_sent
from tarry.wire.tasks import Downstream, Page, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

_JSON = {"content-type": "application/json"}
_UNAVAILABLE = 503

_policy = decoded(RetryPolicy)
_policies = decoded(Page[RetryPolicy])
_downstream = decoded(Downstream)
_downstreams = decoded(Page[Downstream])


class Health(msgspec.Struct, frozen=True):
    """Whether the service takes tasks and works on them; `failing` says what is out of order."""

    ready: bool
    failing: dict[str, Any] = {}


class OperatorRequests:
    """What an operator asks for."""

    # --- policies and downstreams -----------------------------------------------------------------

    def policies(self, cursor: str | None) -> Request[Page[RetryPolicy]]:
        """List policies."""
        return page("/retry-policies", _policies, cursor)

    def policy(self, policy_id: str, version: int | None) -> Request[RetryPolicy]:
        """Look at a policy."""
        query = "" if version is None else f"?version={version}"
        return Request(method="GET", path=_policy_path(policy_id) + query, read=_policy)

    def put_policy(
        self, policy_id: str, policy: Policy | Mapping[str, Any]
    ) -> Request[RetryPolicy]:
        """Write a policy."""
        if isinstance(policy_id, str) and "/" in policy_id:
            rule = "must have letters, digits and ._- only"
            raise ConfigurationError("policy_id", rule, policy_id)
        return Request(
            method="PUT",
            path=_policy_path(policy_id),
            read=_policy,
            headers=_JSON,
            content=written("policy", _fields(policy)),
        )

    def delete_policy(self, policy_id: str) -> Request[None]:
        """Forget a policy."""
        return Request(method="DELETE", path=_policy_path(policy_id), read=nothing)

    def downstreams(self, cursor: str | None) -> Request[Page[Downstream]]:
        """List downstreams."""
        return page("/downstreams", _downstreams, cursor)

    def hand(self, lane: str, act: Literal["pause", "resume", "reset"]) -> Request[Downstream]:
        """Move a lane. Done twice it is the same, which its key says."""
        path = f"/downstreams/{named('lane', lane)}/{act}"
        return Request(method="POST", path=path, read=_downstream, headers=repeatable())

    # --- the service itself -----------------------------------------------------------------------

    def health(self) -> Request[Health]:
        """Ask how the service is; sent once, for what it says now is the answer."""

        def read(answer: Answer) -> Health:
            if answer.status != _UNAVAILABLE:
                return Health(ready=True)
            problem = problem_of(answer.content)
            if not isinstance(failing := problem.get("failing"), dict):
                raise request.error(answer, 0.0)
            return Health(ready=False, failing=failing)  # pyright: ignore[reportUnknownArgumentType]

        request: Request[Health] = Request(
            method="GET",
            path="/readyz",
            read=read,
            also=frozenset({_UNAVAILABLE}),
            manner="once",
        )
        return request

    def events(self, manner: Manner) -> Request[None]:
        """Listen to what happens. The answer is read as it comes, by others."""
        headers = {"accept": "text/event-stream"}
        return Request(method="GET", path="/events", read=_stream, headers=headers, manner=manner)


def _stream(answer: Answer) -> None:
    if is_whole(answer.headers):
        msg = "the answer to GET /events is no stream of events: is this a tarry service?"
        raise ServiceError(msg, status=answer.status)


def _policy_path(policy_id: str) -> str:
    return f"/retry-policies/{identified('policy_id', policy_id)}"


def _fields(policy: Policy | Mapping[str, Any]) -> Mapping[str, Any]:
    return policy_sent(policy) if isinstance(policy, Policy) else policy
