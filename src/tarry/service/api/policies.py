"""`/retry-policies`: the policies of a tenant, and the validation of policies and overrides."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tarry.core.policy import (
    HEADER_NAME_PATTERN,
    HIGHEST_STATUS,
    LOWEST_STATUS,
    STATUS_CLASSES,
    PolicyField,
    plan_retries,
)
from tarry.errors import ConfigurationError
from tarry.service.api import problems
from tarry.service.api.action_log import changed_fields
from tarry.service.api.messages import ApiResponse, NoQuery, PageQuery, decode_json, json_response
from tarry.service.api.problems import from_configuration_error, invalid, unknown_field
from tarry.service.api.quotas import too_many_policy_versions
from tarry.service.api.routing import Operation
from tarry.service.model import PolicyVersion
from tarry.service.store import PolicyWriteStatus
from tarry.wire import policies as wire
from tarry.wire.policies import SERVICE_PRESETS
from tarry.wire.tasks import Page, PlannedRetry, PolicyName, PolicySchedule, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.core.policy import Policy
    from tarry.service.api.context import ApiContext, ApiLimits
    from tarry.service.api.messages import ApiRequest

_fields_decoder = msgspec.json.Decoder(dict[str, Any])
_POLICY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PATH = "/retry-policies"
_POLICY_PATH = "/retry-policies/{policyId}"
_MAX_SCHEDULE_ROWS = 50
_MAX_PLANNED_RETRIES = 1_000
"""Computing them takes about 1 ms, for which other requests wait."""
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
_PRESET_CURSOR_PREFIX = "preset:"
"""A cursor with this prefix is a position among the built-in policies (presets), which are listed
last. The cursors of the store are policy ids, which have no colon."""


def _json_type(field: PolicyField) -> Any:
    """Return the JSON type of a policy field, with its bounds and its description for OpenAPI."""
    json_type: Any
    bounds: dict[str, Any] = {}
    match field.type:
        case "choice":
            json_type = Literal[tuple(sorted(wire.json_choices(field)))]
        case "statuses":
            not_success = {"not": {"minimum": 200, "maximum": 299}}
            status = Meta(ge=LOWEST_STATUS, le=HIGHEST_STATUS, extra_json_schema=not_success)
            status_class = Meta(extra_json_schema={"enum": sorted(STATUS_CLASSES)})
            json_type = list[Annotated[int, status] | Annotated[str, status_class]]
            bounds = {"max_length": wire.MAX_ENTRIES}
        case "codes":
            code_schema = {"enum": sorted(field.choices)}
            json_type = list[Annotated[str, Meta(extra_json_schema=code_schema)]]
            bounds = {"max_length": wire.MAX_ENTRIES}
        case "header":
            json_type = str
            bounds = {"min_length": 1, "max_length": 64, "pattern": HEADER_NAME_PATTERN}
        case _:
            minimum = field.minimum if field.is_json_minimum_allowed else wire.MIN_DURATION_MS
            json_type = int if field.type == "count" else float
            bounds = {"ge": minimum, "le": wire.json_maximum(field)}
    if field is wire.SCHEDULE_FIELD:
        json_type = list[Annotated[float, Meta(**bounds)]]
        bounds = {"min_length": 1, "max_length": wire.MAX_ENTRIES}
    json_type = Annotated[json_type, Meta(description=field.help, **bounds)] | msgspec.UnsetType
    return json_type | None if field.is_optional and not field.service_rejects_null else json_type


PolicyFields: type[msgspec.Struct] = msgspec.defstruct(
    "PolicyFields",
    [
        (field.name, _json_type(field), msgspec.field(name=name, default=msgspec.UNSET))
        for name, field in wire.JSON_FIELDS.items()
    ],
    rename="camel",
    kw_only=True,
    omit_defaults=True,
)
"""The JSON body of a policy, only for OpenAPI and error messages; every field is optional."""
PolicyFields.__doc__ = "The fields of a policy. Omitted fields are those of the built-in `default`."
NewPolicy: type[msgspec.Struct] = msgspec.defstruct(
    "NewPolicy", [("policy_id", PolicyName)], bases=(PolicyFields,), rename="camel", kw_only=True
)
"""The JSON body of a policy that is created with POST, only for OpenAPI and error messages."""
NewPolicy.__doc__ = "A policy to create. Omitted fields are those of the built-in `default`."


class VersionQuery(msgspec.Struct, rename="camel", frozen=True, forbid_unknown_fields=True):
    """The version of the policy to return; the newest if omitted."""

    version: Annotated[int, Meta(ge=1, le=wire.MAX_NUMBER)] | None = None


class PolicyResource:
    """The operations on the policies of a tenant."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    @Operation(
        "POST", _PATH, "createPolicy", RetryPolicy, (200, 201), errors=(409, 429), body=NewPolicy
    )
    async def create(self, request: ApiRequest) -> ApiResponse:
        """Create a policy. A repeated request returns 200 if the fields are equal, else 409."""
        fields = await _read_fields(request, self._context.limits)
        if "policyId" not in fields:
            raise invalid("policyId", "is missing")
        policy_id = fields.pop("policyId")
        if not isinstance(policy_id, str):
            raise invalid("policyId", "must be a string")
        location = f"{_PATH}/{check_policy_id(policy_id)}"
        status, policy = await self._write(request, policy_id, fields, replace=False)
        if status is PolicyWriteStatus.CONFLICT:
            detail = f"Policy {policy_id} exists with different fields. PUT {location} changes it."
            raise problems.POLICY_EXISTS.error(detail, field="policyId")
        return _write_response(status, policy, (b"location", location.encode()))

    @Operation("GET", _PATH, "listPolicies", Page[RetryPolicy], query=PageQuery)
    async def list_policies(self, request: ApiRequest) -> ApiResponse:
        """List the newest version of each policy; built-in policies come last."""
        query = request.parse_query(PageQuery)
        items: list[RetryPolicy] = []
        cursor = query.cursor
        if cursor is None or not cursor.startswith(_PRESET_CURSOR_PREFIX):
            with problems.convert_errors("cursor"):
                page = await self._context.store.list_policies(
                    request.tenant, cursor=cursor, limit=query.limit
                )
            items = [_stored_view(policy) for policy in page.items]
            if page.cursor is not None:
                return json_response(200, Page(items=items, next_cursor=page.cursor))
            cursor = _PRESET_CURSOR_PREFIX
        last_name = cursor.removeprefix(_PRESET_CURSOR_PREFIX)
        for name in sorted(SERVICE_PRESETS):
            if name <= last_name:
                continue
            if len(items) == query.limit:
                cursor = _PRESET_CURSOR_PREFIX + last_name
                return json_response(200, Page(items=items, next_cursor=cursor))
            if await self._context.store.get_policy(request.tenant, name) is None:
                items.append(_preset_view(name))
            last_name = name
        return json_response(200, Page(items=items, next_cursor=None))

    @Operation(
        "PUT", _POLICY_PATH, "putPolicy", RetryPolicy, (200, 201), errors=(429,), body=PolicyFields
    )
    async def put(self, request: ApiRequest) -> ApiResponse:
        """Create a new version. Tasks without a policyVersion use it from their next decision."""
        policy_id = check_policy_id(request.path_parameter("policyId"))
        fields = await _read_fields(request, self._context.limits)
        if fields.pop("policyId", policy_id) != policy_id:
            raise invalid("policyId", "must be equal to the policyId in the path")
        return _write_response(*await self._write(request, policy_id, fields, replace=True))

    @Operation("GET", _POLICY_PATH, "getPolicy", RetryPolicy, query=VersionQuery)
    async def get(self, request: ApiRequest) -> ApiResponse:
        """Get a policy with all its fields."""
        query = request.parse_query(VersionQuery)
        policy_id = request.path_parameter("policyId")
        policy = await self._context.store.get_policy(request.tenant, policy_id, query.version)
        if policy is not None:
            return json_response(200, _stored_view(policy))
        if query.version is None and policy_id in SERVICE_PRESETS:
            return json_response(200, _preset_view(policy_id))
        newest = await self._context.engine.policies.load(request.tenant, policy_id)
        if query.version is not None and newest is not None:
            versions = describe_versions(policy_id, newest.version)
            raise problems.NOT_FOUND.error(f"Version {query.version} does not exist: {versions}.")
        raise problems.no_such("policy")

    @Operation("DELETE", _POLICY_PATH, "deletePolicy", None, statuses=(204,), errors=(409,))
    async def delete(self, request: ApiRequest) -> ApiResponse:
        """Delete a policy with all its versions. Not possible while unfinished tasks (PENDING or
        IN_FLIGHT) use it.
        """
        request.parse_query(NoQuery)
        policy_id = request.path_parameter("policyId")
        before = await self._context.store.get_policy(request.tenant, policy_id)
        status = await self._context.store.delete_policy(request.tenant, policy_id)
        self._context.engine.policies.invalidate(request.tenant, policy_id)
        if status is PolicyWriteStatus.CONFLICT:
            detail = (
                f"Unfinished tasks use {policy_id}. Wait until they are finished, or cancel them "
                f"(GET /retry-tasks?policyId={policy_id} lists them)."
            )
            if policy_id == "default":
                detail += f" PUT {_PATH}/default with {{}} restores the built-in policy at once."
            raise problems.POLICY_IN_USE.error(detail)
        if status is PolicyWriteStatus.MISSING:
            if policy_id in SERVICE_PRESETS:
                detail = f"{policy_id} is built in. PUT creates your own policy, which replaces it."
                raise problems.POLICY_BUILT_IN.error(detail)
            raise problems.no_such("policy")
        request.report_change(policy_id, None if before is None else _log_fields(before), None)
        return ApiResponse(204, b"", [])

    @Operation("POST", "/policy-schedules", "planRetries", PolicySchedule, body=PolicyFields)
    async def plan(self, request: ApiRequest) -> ApiResponse:
        """Compute the delays of a policy without storing it."""
        policy = await read_policy(request, self._context.limits)
        plan = plan_retries(policy, _MAX_PLANNED_RETRIES)
        is_average_known = plan.average_retry_count <= _MAX_PLANNED_RETRIES
        schedule = PolicySchedule(
            retries=[
                PlannedRetry(
                    retry_number=number,
                    ceiling_ms=_to_ms(ceiling),
                    shortest_delay_ms=_to_ms(shortest),
                    longest_delay_ms=_to_ms(longest),
                )
                for number, (ceiling, shortest, longest) in enumerate(
                    plan.rows[:_MAX_SCHEDULE_ROWS], 1
                )
            ],
            max_retries=plan.retry_count,
            average_retries=plan.average_retry_count if is_average_known else None,
            longest_wait_ms=_to_ms(plan.longest_wait),
        )
        return json_response(200, schedule)

    async def _write(
        self, request: ApiRequest, policy_id: str, fields: dict[str, Any], *, replace: bool
    ) -> tuple[PolicyWriteStatus, PolicyVersion]:
        tenant = request.tenant
        policy = check_policy(fields, SERVICE_PRESETS["default"], self._context.limits)
        # All fields are written, in sorted order, so that equal policies have equal documents.
        document = _encode_sorted(wire.policy_to_json(policy))
        new_version = PolicyVersion(tenant=tenant, id=policy_id, version=0, document=document)
        quota = self._context.limits.max_tenant_policy_versions
        before = await self._context.store.get_policy(tenant, policy_id)
        result = await self._context.store.put_policy(new_version, replace=replace, quota=quota)
        self._context.engine.policies.invalidate(tenant, policy_id)
        if result[0] is PolicyWriteStatus.OVER_QUOTA:
            raise too_many_policy_versions(quota)
        if result[0] is not PolicyWriteStatus.CONFLICT:
            fields_before = None if before is None else _log_fields(before)
            request.report_change(policy_id, *changed_fields(fields_before, _log_fields(result[1])))
        return result


async def read_policy(request: ApiRequest, limits: ApiLimits) -> Policy:
    """Return the policy in the body; omitted fields are those of the built-in `default`."""
    return check_policy(await _read_fields(request, limits), SERVICE_PRESETS["default"], limits)


async def _read_fields(request: ApiRequest, limits: ApiLimits) -> dict[str, Any]:
    body = await request.read_body(limits.max_request_bytes)
    return decode_json(_fields_decoder, body, PolicyFields)


def _to_ms(seconds: float) -> float:
    """Return milliseconds, rounded to a microsecond."""
    return round(seconds * 1000, 3)


def _write_response(
    status: PolicyWriteStatus, policy: PolicyVersion, *headers: tuple[bytes, bytes]
) -> ApiResponse:
    http_status = 201 if status is PolicyWriteStatus.CREATED else 200
    return json_response(http_status, _stored_view(policy), *headers)


def _log_fields(policy: PolicyVersion) -> dict[str, Any]:
    return {"version": policy.version, **_fields_decoder.decode(policy.document)}


def _stored_view(policy: PolicyVersion) -> RetryPolicy:
    # A document that an older version of the service has stored may lack new fields.
    fields = wire.policy_to_json(SERVICE_PRESETS["default"])
    fields |= _fields_decoder.decode(policy.document)
    fields |= {"policyId": policy.id, "version": policy.version, "createdAt": policy.created_at}
    return msgspec.convert(fields, RetryPolicy)


def _preset_view(name: str) -> RetryPolicy:
    fields = wire.policy_to_json(SERVICE_PRESETS[name])
    return msgspec.convert(
        {**fields, "policyId": name, "version": None, "createdAt": None}, RetryPolicy
    )


def check_policy_id(policy_id: str) -> str:
    """Return the policy id if it is valid, or raise ApiError."""
    if not _POLICY_ID.fullmatch(policy_id):
        rule = "must be 1 to 100 characters (A-Z a-z 0-9 . _ -) and begin with a letter or digit"
        raise invalid("policyId", rule, policy_id)
    return policy_id


def describe_versions(policy_id: str, newest_version: int | None) -> str:
    """Describe which versions a policy has; `newest_version` is None for a built-in policy."""
    if newest_version is None:
        return f"{policy_id} is built in and has no versions"
    return f"the newest version of {policy_id} is {newest_version}"


def check_policy(
    fields: Mapping[str, Any], base: Policy, limits: ApiLimits, *, parent: str = ""
) -> Policy:
    """Return `base` changed by `fields`, or raise ApiError for an invalid field.

    `parent` is the path of `fields` in the request: "policy" for the overrides of a task, else "".
    """
    prefix = f"{parent}." if parent else ""
    for name in fields:
        if name not in wire.JSON_FIELDS:
            raise unknown_field(parent, name, wire.JSON_FIELDS)
    try:
        wire.check_limits(fields)
        policy = wire.policy_from_json(fields, base)
    except ConfigurationError as error:
        field = error.field or ""
        is_known = field.partition("[")[0] in wire.JSON_FIELDS
        path = prefix + field if is_known else parent or "policy"
        raise from_configuration_error(path, error) from None
    if policy.attempt_timeout is None or policy.attempt_timeout > limits.max_attempt_timeout_s:
        max_ms = f"{limits.max_attempt_timeout_s * 1000:.0f}"
        rule = f"must be at most {max_ms} (setting max_attempt_timeout_ms)"
        raise invalid(f"{prefix}attemptTimeoutMs", rule)
    return policy
