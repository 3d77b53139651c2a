"""From what a caller asked for to a task that can be stored: every rule is checked here first."""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from hashlib import blake2b
from itertools import compress
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.core.checks import short
from tarry.errors import ConfigurationError
from tarry.service.api.headers import check_headers
from tarry.service.api.policychecks import check_policy, check_policy_id, no_version
from tarry.service.api.problems import invalid, unreadable
from tarry.service.delivery.targets import parse_target
from tarry.service.model import Content, Task
from tarry.service.store import New
from tarry.wire.tasks import FIRST_TIME

if TYPE_CHECKING:
    from tarry.service.api.problems import Refused
    from tarry.service.api.surroundings import Surroundings
    from tarry.service.delivery.targets import Target
    from tarry.wire.tasks import NewRetryTask

_METHOD = re.compile(r"[A-Z][A-Z0-9_-]{0,31}")
_NOT_OURS = frozenset({"CONNECT", "TRACE"})
_USUAL = frozenset({"POST", "PUT", "PATCH", "DELETE", "GET", "HEAD"})
_JSON = "application/json"
_GRPC = frozenset({"grpc", "grpcs"})

_canonical = msgspec.msgpack.Encoder(order="deterministic").encode
_text = msgspec.json.Decoder(str).decode


class Intake:
    """Checks new tasks, and puts large bodies away."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def accept(
        self, tenant: str, asked: NewRetryTask, key: str | None, trace: str | None
    ) -> tuple[New, Content]:
        """Return the task to add and its content, or raise `Refused`; `key` is of the header."""
        around = self._around
        target = self._target("targetUrl", asked.target_url)
        method = _method(asked.method, target)
        headers = check_headers(asked.headers, around.limits) if asked.headers else {}
        body, is_json = _body(asked)
        if is_json and not any(name.lower() == "content-type" for name in headers):
            headers = {**headers, "Content-Type": _JSON}
        callback = asked.callback_url
        if callback is not None:
            callback = self._target("callbackUrl", callback).url
        if asked.delay_ms is not None and asked.next_attempt_at is not None:
            raise invalid("nextAttemptAt", "delayMs and nextAttemptAt exclude each other.")
        if asked.next_attempt_at is not None:
            check_time("nextAttemptAt", asked.next_attempt_at)
        key = _key(asked.idempotency_key, key)
        policy_id = check_policy_id(asked.policy_id) if asked.policy_id else "default"
        overrides = asked.policy or None
        task_id = around.new_id()
        task = Task(
            id=task_id,
            tenant=tenant,
            lane=f"{tenant}/{target.origin}",
            key=task_id if key is None else key,
            fingerprint=b"",
            content=b"",
            policy_id=policy_id,
            policy_version=asked.policy_version,
            next_attempt_at=asked.next_attempt_at or 0,
        )
        if overrides or around.engine.policies.known(task, None) is None:
            await self._check_policy(task, overrides)
        content = Content(
            url=target.url,
            method=method,
            headers=headers,
            body=body,
            body_ref=asked.body_ref,
            body_size=len(body),
            overrides=overrides,
            callback_url=callback,
            trace=trace,
        )
        task.fingerprint = _fingerprint(task, content)
        if asked.body_ref is not None:
            await self._refer(tenant, content, asked.body_ref)
        elif len(body) > around.limits.inline:
            content.body_ref, content.checksum = await around.payloads.put(tenant, task_id, body)
            content.body, content.owned = b"", True
            task.body_ref = content.body_ref
        task.content = around.seal.pack(content)
        delay = asked.delay_ms
        if delay is None and asked.next_attempt_at is None:
            delay = 0
        return New(task, delay), content

    async def drop(self, content: Content) -> None:
        """Delete the body of a task that was not added."""
        if content.owned and content.body_ref is not None:
            await self._around.payloads.delete([content.body_ref])

    def _target(self, field: str, text: str) -> Target:
        try:
            target = parse_target(text)
            self._around.guard.check_url(target)
            self._check_scheme(target)
        except ConfigurationError as error:
            detail = f"{str(error).replace('targetUrl', field, 1)}."
            raise invalid(field, detail) from None
        return target

    def _check_scheme(self, target: Target) -> None:
        if target.scheme in _GRPC and not self._around.grpc:
            msg = "targetUrl must be http or https: this service has no gRPC (tarry[grpc])"
            raise ConfigurationError(msg)

    async def _check_policy(self, task: Task, overrides: dict[str, Any] | None) -> None:
        policies = self._around.engine.policies
        chosen = policies.known(task, None)
        if chosen is None:
            chosen = await policies.read(task.tenant, task.policy_id, task.policy_version)
        if chosen is None:
            raise await self._no_policy(task)
        if overrides:
            check_policy(overrides, chosen.policy, self._around.limits, "policy.")

    async def _no_policy(self, task: Task) -> Refused:
        name, version = task.policy_id, task.policy_version
        newest = await self._around.engine.policies.read(task.tenant, name)
        if newest is None:
            detail = f"There is no policy {short(name)}: GET /retry-policies lists those there are."
            return invalid("policyId", detail)
        return invalid("policyVersion", no_version(name, version, newest.version))

    async def _refer(self, tenant: str, content: Content, ref: str) -> None:
        payloads = self._around.payloads
        try:
            payloads.check_ref(tenant, ref)
            content.body_size, content.etag = await payloads.stamp(ref)
        except ConfigurationError as error:
            raise invalid("bodyRef", f"{error}.") from None


def check_time(field: str, time: int | None) -> None:
    """Refuse a time near 1970: it is one of today, in seconds."""
    if time is not None and time < FIRST_TIME:
        detail = (
            f"{field} must be milliseconds since 1970, at least {FIRST_TIME}, got {time}: are "
            "these seconds?"
        )
        raise invalid(field, detail)


def _method(method: str, target: Target) -> str:
    if target.scheme.startswith("grpc"):
        if method != "POST":
            raise invalid("method", f"method of a gRPC call is POST, got {short(method)}.")
    elif method not in _USUAL and (not _METHOD.fullmatch(method) or method in _NOT_OURS):
        detail = (
            f"method must be one of HTTP in capitals, not CONNECT or TRACE, got {short(method)}."
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


def _body(asked: NewRetryTask) -> tuple[bytes, bool]:
    """Return the bytes to send, and whether they are JSON."""
    raw = b"" if isinstance(asked.body, msgspec.UnsetType) else bytes(asked.body)
    is_given = raw not in {b"", b"null"}
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
        raise unreadable("The JSON is not UTF-8.") from None


def _check_one_body(asked: NewRetryTask, body: bool) -> None:  # noqa: FBT001
    names = ("body", "bodyBase64", "bodyRef")
    there = (body, asked.body_base64 is not None, asked.body_ref is not None)
    given = list(compress(names, there))
    if len(given) > 1:
        raise invalid(given[1], f"{' and '.join(given)} exclude each other: send one of them.")


def _fingerprint(task: Task, content: Content) -> bytes:
    """Return a digest of what the caller asked for: the same again gives the same.

    When to begin is no part of it: who asks again may have less time left.
    """
    wanted = (
        content.url,
        content.method,
        sorted([(name.lower(), value) for name, value in content.headers.items()]),
        content.body,
        content.body_ref,
        content.overrides,
        content.callback_url,
        task.policy_id,
        task.policy_version,
    )
    return blake2b(_canonical(wanted), digest_size=16).digest()
