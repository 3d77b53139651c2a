"""From what a caller asked for to a task that can be stored: every rule is checked here first."""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from itertools import compress
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.errors import ConfigurationError, StoreUnavailable, short_repr
from tarry.service.api.policy_validation import check_policy, check_policy_id, unknown_version
from tarry.service.api.problems import invalid, malformed
from tarry.service.delivery.targets import parse_target
from tarry.service.model import Task, TaskContent
from tarry.service.store import NewTask
from tarry.wire.tasks import FIRST_TIME

if TYPE_CHECKING:
    from tarry.service.api.context import ApiLimits

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.problems import ApiError
    from tarry.service.delivery.targets import Target
    from tarry.wire.tasks import RetryTaskRequest

_METHOD = re.compile(r"[A-Z][A-Z0-9_-]{0,31}")
_NOT_OURS = frozenset({"CONNECT", "TRACE"})
_USUAL = frozenset({"POST", "PUT", "PATCH", "DELETE", "GET", "HEAD"})
_JSON = "application/json"
_GRPC = frozenset({"grpc", "grpcs"})

_canonical = msgspec.msgpack.Encoder(order="deterministic").encode
_text = msgspec.json.Decoder(str).decode


class TaskValidator:
    """Checks new tasks, and puts large bodies away."""

    def __init__(self, around: ApiContext) -> None:
        self._around = around
        self._policies = around.engine.policies

    def accept(
        self, tenant: str, asked: RetryTaskRequest, key: str | None, trace: str | None
    ) -> tuple[NewTask, TaskContent]:
        """Return the task to add and its content, or raise `Refused`; `key` is of the header.

        A task without packed content, which few are, has to be completed.
        """
        around = self._around
        target = self._target("targetUrl", asked.target_url)
        method = _method(asked.method, target)
        headers = asked.headers or {}
        names = check_headers(headers, around.limits) if headers else ()
        body, is_json = _body(asked)
        if is_json and "content-type" not in names:
            headers = {**headers, "Content-Type": _JSON}
            names = (*names, "content-type")
        callback = asked.callback_url
        if callback is not None:
            callback = self._target("callbackUrl", callback).url
        begin = asked.next_attempt_at
        if begin is not None:
            if asked.delay_ms is not None:
                raise invalid("nextAttemptAt", "delayMs and nextAttemptAt exclude each other.")
            check_epoch_ms("nextAttemptAt", begin)
        key = _key(asked.idempotency_key, key)
        task_id = around.new_id()
        content = TaskContent(
            url=target.url,
            method=method,
            headers=headers,
            body=body,
            body_ref=asked.body_ref,
            body_size=len(body),
            overrides=asked.policy or None,
            callback_url=callback,
            trace=trace,
        )
        task = Task(
            id=task_id,
            tenant=tenant,
            lane=f"{tenant}/{target.origin}",
            key=task_id if key is None else key,
            fingerprint=b"",
            content=b"",
            policy_id=check_policy_id(asked.policy_id) if asked.policy_id else "default",
            policy_version=asked.policy_version,
            next_attempt_at=begin or 0,
        )
        if (
            not asked.policy
            and asked.body_ref is None
            and len(body) <= around.limits.inline_body_bytes
            and self._policies.known(task, None) is not None
        ):
            task.fingerprint = _fingerprint(task, content, names)
            task.content = around.codec.pack(content)
        delay = asked.delay_ms
        return NewTask(task, 0 if delay is None and begin is None else delay), content

    async def complete(self, task: Task, content: TaskContent) -> None:
        """Pack the content, when others were asked about the policy and about the body."""
        await self._check_policy(task, content.overrides)
        task.fingerprint = _fingerprint(task, content, lower_header_names(tuple(content.headers)))
        if content.body_ref is not None:
            await self._refer(task.tenant, content, content.body_ref)
        elif len(content.body) > self._around.limits.inline_body_bytes:
            put = self._around.payloads.put
            content.body_ref, content.checksum = await put(task.tenant, task.id, content.body)
            content.body, content.owned = b"", True
            task.body_ref = content.body_ref
        task.content = self._around.codec.pack(content)

    async def drop(self, content: TaskContent) -> None:
        """Delete the body of a task that was not added; one that stays is swept."""
        if content.owned and content.body_ref is not None:
            with suppress(StoreUnavailable):
                await self._around.payloads.delete([content.body_ref])

    def _target(self, field: str, text: str) -> Target:
        try:
            target = parse_target(text)
            self._around.guard.check_url(target)
        except ConfigurationError as error:
            raise invalid(field, f"{error.with_field(field)}.") from None
        if target.scheme in _GRPC and not self._around.has_grpc:
            detail = f"{field} must be http or https: this service has no gRPC (tarry[grpc])."
            raise invalid(field, detail)
        return target

    async def _check_policy(self, task: Task, overrides: dict[str, Any] | None) -> None:
        policies = self._policies
        chosen = policies.known(task, None)
        if chosen is None:
            chosen = await policies.read(task.tenant, task.policy_id, task.policy_version)
        if chosen is None:
            raise await self._no_policy(task)
        if overrides:
            check_policy(overrides, chosen.policy, self._around.limits, "policy.")

    async def _no_policy(self, task: Task) -> ApiError:
        name, version = task.policy_id, task.policy_version
        newest = await self._policies.read(task.tenant, name)
        if newest is None:
            detail = (
                f"There is no policy {short_repr(name)}: GET /retry-policies lists those there are."
            )
            return invalid("policyId", detail)
        return invalid("policyVersion", unknown_version(name, version, newest.version))

    async def _refer(self, tenant: str, content: TaskContent, ref: str) -> None:
        payloads = self._around.payloads
        try:
            payloads.validate_ref(tenant, ref)
            content.body_size, content.etag = await payloads.head_object(ref)
        except ConfigurationError as error:
            raise invalid("bodyRef", f"{error}.") from None


def check_epoch_ms(field: str, time: int | None) -> None:
    """Refuse a time near 1970: it is one of today, in seconds."""
    if time is not None and time < FIRST_TIME:
        detail = (
            f"{field} must be milliseconds since 1970, at least {FIRST_TIME}, got {time}: are "
            "these seconds?"
        )
        raise invalid(field, detail)


def _method(method: str, target: Target) -> str:
    if target.scheme in _GRPC:
        if method != "POST":
            raise invalid("method", f"method of a gRPC call is POST, got {short_repr(method)}.")
    elif method not in _USUAL and (not _METHOD.fullmatch(method) or method in _NOT_OURS):
        detail = (
            "method must be one of HTTP in capitals, not CONNECT or TRACE, "
            f"got {short_repr(method)}."
        )
        raise invalid("method", detail)
    return method


def _key(field: str | None, header: str | None) -> str | None:
    if field is None:
        return header
    if not (field.isascii() and field.isprintable()):
        detail = "idempotencyKey must be visible ASCII characters and spaces."
        raise invalid("idempotencyKey", detail)
    if header is not None and header != field:
        raise invalid("idempotencyKey", "idempotencyKey and the Idempotency-Key header differ.")
    return field


def _body(asked: RetryTaskRequest) -> tuple[bytes, bool]:
    """Return the bytes to send, and whether they are JSON."""
    raw = b"" if asked.body is msgspec.UNSET else bytes(asked.body)
    is_given = raw not in (b"", b"null")  # a set would hash a long text
    if asked.body_base64 is not None or asked.body_ref is not None:
        _check_one_body(asked, is_given)
    if asked.body_base64 is not None:
        try:
            return b64decode(asked.body_base64, validate=True), False
        except (Base64Error, ValueError):
            raise invalid("bodyBase64", "bodyBase64 must be base64 (RFC 4648, 4).") from None
    if not is_given:
        return b"", False
    try:
        if raw[:1] == b'"':
            return _text(raw).encode(), False
        raw.decode()
        return msgspec.json.format(raw, indent=-1), True
    except UnicodeDecodeError:  # all else was checked when the document was read
        raise malformed("The JSON is not UTF-8.") from None


def _check_one_body(asked: RetryTaskRequest, body: bool) -> None:  # noqa: FBT001
    names = ("body", "bodyBase64", "bodyRef")
    there = (body, asked.body_base64 is not None, asked.body_ref is not None)
    given = list(compress(names, there))
    if len(given) > 1:
        raise invalid(given[1], f"{' and '.join(given)} exclude each other: send one of them.")


def _fingerprint(task: Task, content: TaskContent, names: tuple[str, ...]) -> bytes:
    """Return a digest of what the caller asked for: the same again gives the same.

    Without a key of his, nothing is ever the same again, and there is none.
    `names` are those of its headers in lower case. When to begin is no part of it: who asks again
    may have less time left.
    """
    if task.key == task.id:
        return b""
    wanted = (
        content.url,
        content.method,
        sorted(zip(names, content.headers.values(), strict=True)),
        content.body,
        content.body_ref,
        content.overrides,
        content.callback_url,
        task.policy_id,
        task.policy_version,
    )
    return sha256(_canonical(wanted)).digest()[:16]  # in hardware, on most machines


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_is_value = re.compile(r"(?:[!-~]++(?:[\t ]++[!-~]++)*+)?").fullmatch
"""Visible ASCII with blanks inside (RFC 9110, 5.5): no line can be smuggled in."""

_HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
_OURS = frozenset({
    "accept-encoding", "content-length", "expect", "host", "idempotency-key", "traceparent",
    "tracestate", "x-retry-attempt",
})  # fmt: skip
_OUR_PREFIX = "webhook-"


def check_headers(given: dict[str, Any], limits: ApiLimits) -> tuple[str, ...]:
    """Return the names of headers in lower case, or refuse a header by its name."""
    if len(given) > limits.max_headers:
        detail = f"headers may have {limits.max_headers} fields, got {len(given)}."
        raise invalid("headers", detail)
    lower = lower_header_names(tuple(given))
    size = 0
    for name, value in given.items():
        if not isinstance(value, str):
            raise invalid(_path(name), f"{name} must be a string, got {short_repr(value)}.")
        is_plain = value.isascii() and value.isprintable() and value == value.strip()
        if not is_plain and not _is_value(value):  # one with a tab may do
            detail = f"{name} must be visible ASCII characters, with blanks only between them."
            raise invalid(_path(name), detail)
        size += len(name) + len(value) + 4
    if size > limits.max_header_bytes:
        raise invalid("headers", f"headers may have {limits.max_header_bytes} bytes, got {size}.")
    return lower


@lru_cache(256)  # most tasks have the same few names; these are short, for others are refused
def lower_header_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of headers in lower case, or refuse one that is not the caller's to set."""
    for name in given:
        if wrong := _what_is_wrong(name):
            raise invalid(_path(name), wrong)
    lower = tuple(name.lower() for name in given)
    if len(set(lower)) < len(lower):
        twice = next(name for name in given if lower.count(name.lower()) > 1)
        raise invalid(_path(twice), f"{twice} is given twice, in capitals and not.")
    return lower


def _what_is_wrong(name: str) -> str | None:
    if not _TOKEN.fullmatch(name):
        return f"A header name must be a token of 1 to 256 characters, got {short_repr(name)}."
    lower = name.lower()
    if lower in _HOP_BY_HOP:
        return f"{name} is about one connection, and not the caller's to set."
    if lower in _OURS or lower.startswith(_OUR_PREFIX):
        return f"{name} is set by the service itself."
    return None


def _path(name: str) -> str:
    return f"headers.{name[:256]}"
