"""Errors of the clients, importable from `tarry.client`; docs/errors.md shows their hierarchy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.errors import TarryError

if TYPE_CHECKING:
    from collections.abc import Mapping


class ServiceError(TarryError):
    """The retry service rejected a request, failed, sent an invalid response or did not respond."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        problem: Mapping[str, object] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the response; None when no response was received."""
        self.problem: dict[str, object] = dict(problem or {})
        """Members of the problem document (RFC 9457) in the response; empty if there is none."""
        self.retry_after = retry_after
        """Seconds to wait before repeating the request; None without a Retry-After header."""

    @property
    def title(self) -> str | None:
        """Short summary of the problem type."""
        return self._problem_text("title")

    @property
    def detail(self) -> str | None:
        """What is wrong with this request."""
        return self._problem_text("detail")

    @property
    def field(self) -> str | None:
        """Path of the invalid field in the API's JSON, such as `policy.maxAttempts`, if known."""
        return self._problem_text("field")

    def _problem_text(self, member: str) -> str | None:
        value = self.problem.get(member)
        return value if isinstance(value, str) else None


class ServiceUnreachable(ServiceError, ConnectionError):
    """No response was received. The service may have processed the request."""


class ServiceUnavailable(ServiceError):
    """The service, or a proxy in front of it, cannot process the request now (503, 502, 504)."""


class InvalidRequest(ServiceError):
    """The request is invalid (400, 413, 422, other 4xx). `field` is the invalid field, if known."""


class NotAuthorized(ServiceError):
    """The API key is missing, wrong or revoked (401), or the request is forbidden (403)."""


class NotFound(ServiceError):
    """The task, policy, replay or downstream does not exist (404)."""


class Conflict(ServiceError):
    """The resource exists, but its current state does not allow the operation (409)."""


class TooManyRequests(ServiceError):
    """A limit of the tenant is reached; repeat the request after `retry_after` seconds (429)."""


class NotFinished(TarryError, TimeoutError):
    """A task or replay did not finish within the timeout of a wait.

    `last` is the task or replay as last fetched; None if it was not fetched.
    """

    def __init__(self, message: str, last: object = None) -> None:
        super().__init__(message)
        self.last = last
