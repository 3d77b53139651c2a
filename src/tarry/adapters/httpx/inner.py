"""The transport inside, which sends: what it may be, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError, ConfigurationTypeError, MissingExtra

if TYPE_CHECKING:
    from typing import Never


def checked(transport: Any, kind: str, method: str) -> Any:
    """Return the transport of the user, or a new one of this kind; it sends with this method."""
    if transport is None:
        return _default(kind)
    retries: Any = getattr(getattr(transport, "_pool", None), "_retries", 0)
    if retries or hasattr(transport, "tarry_retries"):
        msg = (
            f"the transport inside must not retry, got {transport!r}: two layers multiply; leave "
            f"retries= of {kind} at 0, and say it with policy=tarry.Policy(max_attempts=4)"
        )
        raise ConfigurationError(msg)
    if isinstance(transport, type) or not hasattr(transport, method):
        msg = f"the transport inside must be {kind}() or the like, got {transport!r}"
        raise ConfigurationTypeError(msg)
    return transport


def _default(kind: str) -> Any:
    try:
        import httpx
    except ImportError:
        try:
            import httpx2 as httpx  # type: ignore[no-redef]
        except ImportError:
            msg = "this needs httpx: pip install 'tarry[httpx]'"
            raise MissingExtra(msg) from None
    return getattr(httpx, kind)()


def refuse_other_package(transport: object, request: object, error: Exception) -> None:
    """Say what it means that httpx does not know a request of httpx2, or the reverse."""
    inside, outside = _package(transport), _package(request)
    if isinstance(error, AssertionError) and {inside, outside} == {"httpx", "httpx2"}:
        msg = (
            f"the transport inside is of {inside}, and the client of {outside}: give it one of "
            f"the client's package, {outside}.{type(transport).__name__}()"
        )
        raise ConfigurationError(msg) from error


def _package(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]


def misplaced(transport: object, *_: object) -> Never:
    """Stand where a client looks for the other kind of transport."""
    msg = (
        "a Client takes a RetryTransport, and an AsyncClient an AsyncRetryTransport; this one was "
        f"given the other's, {type(transport).__name__}"
    )
    raise ConfigurationTypeError(msg)
