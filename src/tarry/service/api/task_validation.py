"""Validation of new tasks: builds the task to store from a `RetryTaskRequest`."""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET

from tarry.core.text import suggest
from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.api.policies import check_policy, check_policy_id, describe_versions
from tarry.service.api.problems import MALFORMED, convert_errors, from_configuration_error, invalid
from tarry.service.api.trace_context import clean_tracestate, is_traceparent
from tarry.service.delivery.grpc import encode_metadata
from tarry.service.delivery.targets import LANE_KEY, lane_name, parse_target
from tarry.service.engine.context import BODY_STORE
from tarry.service.model import Task, TaskContent
from tarry.service.payloads import BodyStoreUnavailable
from tarry.service.store import Ingest
from tarry.wire.http import (
    HOP_BY_HOP_HEADERS,
    SERVICE_HEADER_PREFIXES,
    SERVICE_HEADERS,
    STANDARD_METHODS,
    is_idempotency_key,
)
from tarry.wire.policies import SERVICE_PRESETS
from tarry.wire.tasks import MIN_TIME_MS, SECRET_NAME_PATTERN

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext, ApiLimits
    from tarry.service.api.problems import ApiError
    from tarry.service.api.trace_context import TraceContext
    from tarry.service.delivery.targets import Target
    from tarry.wire.tasks import RetryTaskRequest

_GRPC_SCHEMES = frozenset({"grpc", "grpcs"})

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_is_header_value = re.compile(r"(?:[!-~]++(?:[\t ]++[!-~]++)*+)?").fullmatch
"""Matches visible ASCII with spaces or tabs inside (RFC 9110, 5.5). No header can be injected."""
_SECRET_NAME = re.compile(SECRET_NAME_PATTERN)
_MAX_HEADER_NAME_CHARS = 256
_HEADER_OVERHEAD_BYTES = len(": \r\n")
_MAX_SUGGESTED_POLICIES = 1_000
"""Of the tenant's policies, so many are compared with an unknown name."""

_encode_canonically = msgspec.msgpack.Encoder(order="deterministic").encode
_format_json = msgspec.json.format
_decode_string = msgspec.json.Decoder(str).decode


class TaskBuilder:
    """Validates requests, builds the tasks to add, and stores their large bodies."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._policies = context.engine.policies

    def build_task(
        self,
        tenant: str,
        request: RetryTaskRequest,
        header_key: str | None,
        header_trace: TraceContext | None,
        *,
        hide_body: bool = False,
        vendor: str | None = None,
    ) -> Ingest:
        """Return the task to add, or raise ApiError.

        `header_key` is the value of the header `Idempotency-Key`, and `header_trace` the trace in
        the headers of the request. With `hide_body`, the API never shows the body. `vendor` is the
        vendor whose API the request has used.
        If building the task needs I/O, `packed_content` of the task is empty, and the caller has to
        await `finish_building`. Most tasks need no I/O.
        """
        context = self._context
        target = self._parse_target("targetUrl", request.target_url)
        if request.method != "POST":
            self._check_method(request.method, target)
        headers, header_names, secret_headers = self._check_headers(
            tenant, target, request.headers or {}
        )
        body, is_json = _encode_body(request)
        if request.method == "HEAD" and (body or request.body_ref is not None):
            field = "bodyRef" if request.body_ref is not None else "body"
            raise invalid(field, "must not be given, because a HEAD request has no body")
        if is_json and "content-type" not in header_names:
            headers = {**headers, "Content-Type": "application/json"}
            header_names = (*header_names, "content-type")
        callback_url = request.callback_url
        if callback_url is not None:
            callback_url = self._parse_target("callbackUrl", callback_url).url
        elif request.callback_policy_id is not None:
            raise invalid("callbackPolicyId", "must not be given without callbackUrl")
        next_attempt_at = request.next_attempt_at
        if next_attempt_at is not None:
            if request.delay_ms is not None:
                raise invalid("nextAttemptAt", "must not be given together with delayMs")
            check_epoch_ms("nextAttemptAt", next_attempt_at)
        lane_key = request.lane_key
        if lane_key is not None and not LANE_KEY.fullmatch(lane_key):
            rule = "must consist of A-Z a-z 0-9 . _ ~ - and begin with a letter or digit"
            raise invalid("laneKey", rule, lane_key)
        trace, tracestate = request.traceparent, None
        if trace is None:
            if header_trace is not None:
                trace, tracestate = header_trace
        elif not is_traceparent(trace):
            rule = (
                "must be a traceparent of W3C Trace Context: 00-<32 hex>-<16 hex>-<2 hex>, and its "
                "ids must not be zero"
            )
            raise invalid("traceparent", rule, trace)
        elif request.tracestate is not None:
            tracestate = clean_tracestate(request.tracestate)
        idempotency_key = _choose_idempotency_key(request.idempotency_key, header_key)
        task_id = context.new_id()
        content = TaskContent(
            url=target.url,
            method=request.method,
            headers=headers,
            body=body,
            body_ref=request.body_ref,
            body_size=len(body),
            overrides=request.policy_overrides or None,
            callback_url=callback_url,
            callback_policy_id=request.callback_policy_id,
            prior_attempts=request.prior_attempts,
            secret_headers=secret_headers,
            trace=trace,
            tracestate=tracestate,
            hide_body=hide_body,
            vendor=vendor,
        )
        task = Task(
            id=task_id,
            tenant=tenant,
            lane=lane_name(tenant, target, lane_key),
            key=task_id if idempotency_key is None else idempotency_key,
            fingerprint=b"",
            packed_content=b"",
            policy_id=check_policy_id(request.policy_id) if request.policy_id else "default",
            policy_version=request.policy_version,
            next_attempt_at=next_attempt_at or 0,
        )
        if (
            not request.policy_overrides
            and request.callback_policy_id is None
            and request.body_ref is None
            and len(body) <= context.limits.inline_body_bytes
            and self._policies.get_for_new_task(task) is not None
        ):
            task.fingerprint = _fingerprint(task, content, header_names)
            task.packed_content = context.codec.pack(content)
        delay_ms = request.delay_ms
        if delay_ms is None and next_attempt_at is None:
            delay_ms = 0
        return Ingest(task, delay_ms, content=content)

    async def finish_building(self, ingest: Ingest) -> None:
        """Build the rest with I/O: load policies, store or look up the body, pack the content."""
        task, content = ingest.task, ingest.content
        await self._check_policy(task, content.overrides)
        await self._check_callback_policy(task.tenant, content.callback_policy_id)
        header_names = check_header_names(tuple(content.headers))
        task.fingerprint = _fingerprint(task, content, header_names)
        try:
            await self._store_body(task, content)
        except BodyStoreUnavailable as error:
            self._context.engine.health.mark_failing(BODY_STORE, error)
            raise
        task.packed_content = self._context.codec.pack(content)

    async def _store_body(self, task: Task, content: TaskContent) -> None:
        """Store a large body, or look up the object that a caller has named as the body."""
        body_store = self._context.body_store
        if content.body_ref is not None:
            with convert_errors("bodyRef"):
                body_store.check_ref(task.tenant, content.body_ref)
                content.body_size, content.etag = await body_store.head_object(content.body_ref)
        elif len(content.body) > self._context.limits.inline_body_bytes:
            ref, checksum = await body_store.put(task.tenant, task.id, content.body)
            content.body_ref, content.checksum = ref, checksum
            content.body, content.body_stored_by_service = b"", True
            task.owned_body_ref = ref

    async def delete_body(self, content: TaskContent) -> None:
        """Delete the body that `finish_building` has stored for a task that was then not added."""
        if content.body_stored_by_service and content.body_ref is not None:
            with suppress(StoreUnavailable):  # maintenance then deletes the body later
                await self._context.body_store.delete([content.body_ref])

    def _parse_target(self, field: str, url: str) -> Target:
        try:
            target = parse_target(url)
            self._context.target_guard.check_host(target)
        except ConfigurationError as error:
            raise from_configuration_error(field, error) from None
        if target.scheme in _GRPC_SCHEMES and not self._context.has_grpc:
            rule = "must be http or https, because gRPC is not installed here (tarry[grpc])"
            raise invalid(field, rule)
        return target

    def _check_method(self, method: str, target: Target) -> None:
        """Raise ApiError for a method that must not be sent. POST is always allowed."""
        if target.scheme in _GRPC_SCHEMES:
            raise invalid("method", "must be POST for a gRPC call", method)
        allowed_methods = self._context.allowed_methods
        if method not in STANDARD_METHODS and method not in allowed_methods:
            names = ", ".join((*STANDARD_METHODS, *allowed_methods))
            rule = f"must be one of {names}; the operator can allow others (`allow_methods`)"
            raise invalid("method", rule, method)

    def _check_headers(
        self, tenant: str, target: Target, headers: dict[str, Any]
    ) -> tuple[dict[str, str], tuple[str, ...], dict[str, str] | None]:
        """Return the headers without secrets, their names in lower case, and the other headers.

        The other headers have the names of secrets as values; None: there are none.
        """
        if not headers:
            return headers, (), None
        header_names, secret_headers = check_headers(headers, self._context.limits)
        if secret_headers is not None:
            self._check_secrets(tenant, target, secret_headers)
            headers = {name: headers[name] for name in headers if name not in secret_headers}
            header_names = check_header_names(tuple(headers))
        if target.scheme in _GRPC_SCHEMES:
            _check_metadata(headers)
        return headers, header_names, secret_headers

    def _check_secrets(self, tenant: str, target: Target, secret_headers: dict[str, str]) -> None:
        """Raise ApiError for a reference to a secret that the settings do not allow."""
        is_grpc = target.scheme in _GRPC_SCHEMES
        for header, name in secret_headers.items():
            path = _header_path(header)
            if header.lower() == "content-type" or (is_grpc and header.lower().endswith("-bin")):
                raise invalid(path, "must be a string, not a secret")
            secret = self._context.engine.secrets.find(tenant, name)
            if secret is None:
                rule = "must be a secret that the operator has defined in the setting `secrets`"
                raise invalid(f"{path}.secret", rule, name)
            if not secret.allows(lane_name(tenant, target)):
                rule = (
                    f"must be a secret that may be sent to {target.endpoint}: the operator can "
                    "allow it with `targets` in the setting `secrets`"
                )
                raise invalid(f"{path}.secret", rule, name)
            if not secret.allows_header(header):
                rule = (
                    f"must be a secret of this header, but {name} may only be sent in "
                    f"{secret.header}: the operator can change `header` in the setting `secrets`"
                )
                raise invalid(f"{path}.secret", rule)
        if is_grpc:
            _check_metadata(secret_headers)  # checks the names; the values are always ASCII

    async def _check_policy(self, task: Task, overrides: dict[str, Any] | None) -> None:
        policies = self._policies
        named_policy = policies.get_for_new_task(task)
        if named_policy is None:
            named_policy = await policies.load(task.tenant, task.policy_id, task.policy_version)
        if named_policy is None:
            newest = await policies.load(task.tenant, task.policy_id)
            if newest is None:
                raise await self._unknown_policy("policyId", task.tenant, task.policy_id)
            rule = f"must exist: {describe_versions(task.policy_id, newest.version)}"
            raise invalid("policyVersion", rule, task.policy_version)
        if overrides:
            check_policy(overrides, named_policy.policy, self._context.limits, parent="policy")

    async def _check_callback_policy(self, tenant: str, policy_id: str | None) -> None:
        if policy_id is not None and await self._policies.load(tenant, policy_id) is None:
            raise await self._unknown_policy("callbackPolicyId", tenant, policy_id)

    async def _unknown_policy(self, field: str, tenant: str, policy_id: str) -> ApiError:
        page = await self._context.store.list_policies(tenant, limit=_MAX_SUGGESTED_POLICIES)
        names = [*(policy.id for policy in page.items), *SERVICE_PRESETS]
        similar = suggest(policy_id, names)
        hint = f"did you mean {similar}?" if similar else "GET /retry-policies lists them"
        return invalid(field, f"must be an existing policy ({hint})", policy_id)


def check_epoch_ms(field: str, time: int | None) -> None:
    """Raise ApiError for a time near 1970, which was probably given in seconds."""
    if time is not None and time < MIN_TIME_MS:
        rule = f"must be milliseconds since 1970, at least {MIN_TIME_MS} (are these seconds?)"
        raise invalid(field, rule, time)


def check_headers(
    headers: dict[str, Any], limits: ApiLimits
) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """Return the header names in lower case, and the names of secrets by header (None: no secret).

    Raises ApiError for an invalid header. The caller checks whether the secrets exist.
    """
    if len(headers) > limits.max_headers:
        raise invalid("headers", f"must have at most {limits.max_headers} fields", len(headers))
    lower_names = check_header_names(tuple(headers))
    secret_headers: dict[str, str] | None = None
    try:
        joined = "".join(headers.values())
    except TypeError:  # not all values are strings
        secret_headers = {
            name: _parse_secret_reference(name, value)
            for name, value in headers.items()
            if not isinstance(value, str)
        }
        headers = {name: headers[name] for name in headers if name not in secret_headers}
        joined = "".join(headers.values())
    # Quick checks of all values together accept most requests. Otherwise, the regular expression
    # checks each value, because blanks and tabs are valid only between visible characters.
    if " " in joined or not (joined.isascii() and joined.isprintable()):
        for name, value in headers.items():
            if not _is_header_value(value):
                rule = "must be visible ASCII characters, with blanks only between them"
                raise invalid(_header_path(name), rule)
    size = len(joined) + sum(map(len, headers)) + _HEADER_OVERHEAD_BYTES * len(headers)
    if size > limits.max_header_bytes:
        raise invalid("headers", f"must have at most {limits.max_header_bytes} bytes", size)
    return lower_names, secret_headers


def _parse_secret_reference(header: str, value: object) -> str:
    """Return the name of the secret in `{"secret": NAME}`."""
    try:
        name = msgspec.convert(value, dict[Literal["secret"], str])["secret"]
    except (msgspec.ValidationError, KeyError):
        rule = 'must be a string, or {"secret": NAME} with the name of a secret'
        raise invalid(_header_path(header), rule) from None
    if not _SECRET_NAME.fullmatch(name):
        rule = "must consist of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        raise invalid(f"{_header_path(header)}.secret", rule, name)
    return name


@lru_cache(256)  # most tasks have the same few names; errors are not cached
def check_header_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return header names in lower case, or raise ApiError for an invalid or reserved name."""
    lower_names = tuple(name.lower() for name in names)
    for name, lower_name in zip(names, lower_names, strict=True):
        path = _header_path(name)
        if not _HEADER_NAME.fullmatch(name):
            max_chars = _MAX_HEADER_NAME_CHARS
            rule = f"has an invalid name: use a token (RFC 9110) of 1 to {max_chars} characters"
            raise invalid(path, rule, name)
        # CGI and WSGI servers pass on `_` and `-` as the same character, so a target could read
        # `Idempotency_Key` of the caller instead of the service's `Idempotency-Key`.
        hyphenated = lower_name.replace("_", "-")
        if hyphenated in HOP_BY_HOP_HEADERS:
            raise invalid(path, "applies only to one connection and must not be set")
        if hyphenated in SERVICE_HEADERS or hyphenated.startswith(SERVICE_HEADER_PREFIXES):
            rule = "is set by the service itself"
            if hyphenated != lower_name:
                rule = f"is read as {name.replace('_', '-')} by many servers, which {rule}"
            raise invalid(path, rule)
    if len(set(lower_names)) < len(lower_names):
        repeated = next(name for name in names if lower_names.count(name.lower()) > 1)
        raise invalid(_header_path(repeated), "is given twice, in different case")
    return lower_names


def _check_metadata(headers: dict[str, Any]) -> None:
    """Raise ApiError for a header that cannot be sent to a gRPC target."""
    try:
        encode_metadata(headers.items())
    except ConfigurationError as error:
        raise from_configuration_error(error.field or "headers", error) from None


def _header_path(name: str) -> str:
    return f"headers.{name[:_MAX_HEADER_NAME_CHARS]}"


def _choose_idempotency_key(body_key: str | None, header_key: str | None) -> str | None:
    key = header_key if body_key is None else body_key
    if key is not None and not is_idempotency_key(key):
        rule = "must be visible ASCII characters, with spaces only inside"
        if body_key is None:
            raise invalid("Idempotency-Key", rule, status=400)
        raise invalid("idempotencyKey", rule)
    if header_key is not None and header_key != key:
        raise invalid("idempotencyKey", "differs from the Idempotency-Key header")
    return key


def _encode_body(request: RetryTaskRequest) -> tuple[bytes, bool]:
    """Return the bytes to send, and whether they are JSON."""
    raw = b"" if request.body is UNSET else bytes(request.body)
    has_body = raw not in (b"", b"null")  # a tuple, because a set would hash a long body
    if request.body_base64 is not None or request.body_ref is not None:
        are_given = (has_body, request.body_base64 is not None, request.body_ref is not None)
        fields = list(compress(("body", "bodyBase64", "bodyRef"), are_given))
        if len(fields) > 1:
            raise invalid(fields[1], f"must not be given together with {fields[0]}")
        if request.body_base64 is not None:
            try:
                return b64decode(request.body_base64, validate=True), False
            except (Base64Error, ValueError):
                raise invalid("bodyBase64", "must be base64 (RFC 4648, section 4)") from None
    if not has_body:
        return b"", False
    try:
        if raw[:1] == b'"':
            return _decode_string(raw).encode(), False
        raw.decode()
        return _format_json(raw, indent=-1), True
    except UnicodeDecodeError:  # other errors were found when the document was decoded
        raise MALFORMED.error("The JSON is not UTF-8.") from None


def _fingerprint(task: Task, content: TaskContent, header_names: tuple[str, ...]) -> bytes:
    """Return a digest that is equal for requests with the same content, whatever their delay.

    The store compares the digests of two requests with the same idempotency key. The digest is
    empty if the caller gave no idempotency key. `header_names` are in lower case.
    """
    if task.key == task.id:
        return b""
    request_fields: tuple[Any, ...] = (
        content.url,
        content.method,
        sorted(zip(header_names, content.headers.values(), strict=True)),
        content.body,
        content.body_ref,
        content.overrides,
        content.callback_url,
        task.policy_id,
        task.policy_version,
    )
    # Newer fields are left out if they are not set, so that stored digests stay valid.
    if content.callback_policy_id is not None:
        request_fields += ({"callbackPolicyId": content.callback_policy_id},)
    if "@" in task.lane:
        request_fields += ({"laneKey": task.lane.partition("@")[2]},)
    if content.secret_headers is not None:
        names = {name.lower(): secret for name, secret in content.secret_headers.items()}
        request_fields += ({"secretHeaders": names},)
    # SHA-256 is fast, because most CPUs have instructions for it. 16 bytes suffice.
    return sha256(_encode_canonically(request_fields)).digest()[:16]
