"""`/retry-policies`: a tenant's own policies, and those that come with the service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tarry.core.policy_fields import HIGHEST_STATUS, LOWEST_STATUS, PolicyField
from tarry.errors import ConfigurationError
from tarry.service.api import problem_types, problems
from tarry.service.api.policy_validation import check_policy, check_policy_id, unknown_version
from tarry.service.api.problems import from_configuration_error
from tarry.service.api.request import NoQuery, PageQuery
from tarry.service.api.response import empty_response, json_response
from tarry.service.api.routing import Operation
from tarry.service.api.views import policy_view
from tarry.service.model import PolicyVersion
from tarry.service.store import PolicyWriteStatus
from tarry.wire.policies import (
    JSON_FIELDS,
    MAX_DURATION_MS,
    MAX_ENTRIES,
    MAX_NUMBER,
    SCHEDULE_FIELD,
    SERVICE_PRESETS,
    json_choices,
    policy_to_wire,
)
from tarry.wire.tasks import Page, PolicyName, RetryPolicy

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.request import ApiRequest
    from tarry.service.api.response import ApiResponse

_document = msgspec.json.Decoder(dict[str, Any])
_encode = msgspec.json.Encoder(order="deterministic").encode
_PRESET = "preset:"
"""Begins the cursor of the presets, which come after the tenant's own; no id has a colon."""


def _json_type(field: PolicyField) -> Any:
    """Return the type of a field in JSON, with its bounds and its help for OpenAPI."""
    json_type: Any
    bounds: dict[str, Any] = {}
    match field.type:
        case "choice":
            json_type = Literal[tuple(sorted(json_choices(field)))]
        case "statuses":
            json_type = list[Annotated[int, Meta(ge=LOWEST_STATUS, le=HIGHEST_STATUS)]]
        case "codes":
            json_type = list[str]
        case _:
            lowest = "ge" if field.is_minimum_allowed else "gt"
            maximum = MAX_DURATION_MS if field.type == "seconds" else MAX_NUMBER
            json_type = int if field.type == "count" else float
            bounds = {lowest: field.minimum, "le": maximum}
    if field is SCHEDULE_FIELD:
        json_type = list[Annotated[float, Meta(**bounds)]]
        bounds = {"min_length": 1, "max_length": MAX_ENTRIES}
    json_type = Annotated[json_type, Meta(description=field.help, **bounds)] | msgspec.UnsetType
    return json_type | None if field.is_optional and not field.is_required_by_service else json_type


PolicyFields = msgspec.defstruct(
    "PolicyFields",
    [
        ("policy_id", PolicyName | msgspec.UnsetType, msgspec.UNSET),
        *(
            (field.name, _json_type(field), msgspec.field(name=name, default=msgspec.UNSET))
            for name, field in JSON_FIELDS.items()
        ),
    ],
    rename="camel",
    kw_only=True,
    omit_defaults=True,
)
"""The JSON body of a policy, for OpenAPI: each field can be left out."""
PolicyFields.__doc__ = (
    "The fields of a policy; one that is left out has the value of the default policy."
)


class VersionQuery(
    msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True
):
    """Which version; by default the newest."""

    version: Annotated[int, Meta(ge=1, le=MAX_NUMBER)] | None = None


class PolicyResource:
    """Reads and writes policies."""

    def __init__(self, around: ApiContext) -> None:
        self._around = around

    def operations(self) -> list[Operation]:
        """Return the rows of the API about policies."""
        one = "/retry-policies/{policyId}"
        return [
            Operation(
                method="POST", path="/retry-policies", name="createPolicy",
                does="Register a policy. The same again is 200, other content for its id 409.",
                handler=self.create, takes=PolicyFields,
                answers={201: RetryPolicy, 200: RetryPolicy},
                refuses=(400, 409, 413, 415, 422, 503),
            ),
            Operation(
                method="GET", path="/retry-policies", name="listPolicies",
                does="List the newest version of each policy, the service's own at the end.",
                handler=self.search, query=PageQuery,
                answers={200: Page[RetryPolicy]}, refuses=(400, 422, 503),
            ),
            Operation(
                method="PUT", path=one, name="putPolicy",
                does="Make a new version, used from the next decision on by tasks that pinned "
                "none.",
                handler=self.put, takes=PolicyFields,
                answers={200: RetryPolicy, 201: RetryPolicy}, refuses=(400, 413, 415, 422, 503),
            ),
            Operation(
                method="GET", path=one, name="getPolicy", does="Tell a policy in full.",
                handler=self.get, query=VersionQuery,
                answers={200: RetryPolicy}, refuses=(400, 404, 422, 503),
            ),
            Operation(
                method="DELETE", path=one, name="deletePolicy",
                does="Forget a policy with all its versions; refused while live tasks use it. "
                "Their numbers are not used again.",
                handler=self.delete, query=NoQuery,
                answers={204: None}, refuses=(400, 404, 409, 422, 503),
            ),
        ]  # fmt: skip

    async def create(self, asked: ApiRequest) -> ApiResponse:
        """Register a policy."""
        fields = await self._fields(asked)
        if "policyId" not in fields:
            raise problems.invalid("policyId", "policyId is missing.")
        policy_id = fields.pop("policyId")
        if not isinstance(policy_id, str):
            raise problems.invalid("policyId", "policyId must be a string.")
        policy_id = check_policy_id(policy_id)
        change, policy = await self._write(asked.tenant, policy_id, fields, replace=False)
        if change is PolicyWriteStatus.CONFLICT:
            detail = f"{policy_id} has other content. PUT /retry-policies/{policy_id} changes it."
            raise problems.conflict(problem_types.POLICY_TAKEN, detail, field="policyId")
        location = (b"location", f"/retry-policies/{policy_id}".encode())
        return json_response(
            201 if change is PolicyWriteStatus.CREATED else 200, _view(policy), location
        )

    async def put(self, asked: ApiRequest) -> ApiResponse:
        """Make a new version."""
        policy_id = check_policy_id(asked.params["policyId"])
        fields = await self._fields(asked)
        if fields.pop("policyId", policy_id) != policy_id:
            raise problems.invalid("policyId", "policyId must be the one of the path.")
        change, policy = await self._write(asked.tenant, policy_id, fields, replace=True)
        return json_response(201 if change is PolicyWriteStatus.CREATED else 200, _view(policy))

    async def search(self, asked: ApiRequest) -> ApiResponse:
        """List policies: the tenant's own, then the presets that are not replaced by one."""
        query = asked.query(PageQuery)
        items: list[RetryPolicy] = []
        cursor = query.cursor
        if cursor is None or not cursor.startswith(_PRESET):
            try:
                page = await self._around.store.list_policies(
                    asked.tenant, cursor=cursor, limit=query.limit
                )
            except ConfigurationError as error:
                raise from_configuration_error("cursor", error) from None
            items = [_view(policy) for policy in page.items]
            if page.cursor is not None:
                return json_response(200, Page(items=items, next_cursor=page.cursor))
            cursor = _PRESET
        last = cursor.removeprefix(_PRESET)
        for name in sorted(SERVICE_PRESETS):
            if name <= last:
                continue
            if len(items) == query.limit:
                return json_response(200, Page(items=items, next_cursor=_PRESET + last))
            if await self._around.store.get_policy(asked.tenant, name) is None:
                items.append(_preset(name))
            last = name
        return json_response(200, Page(items=items, next_cursor=None))

    async def get(self, asked: ApiRequest) -> ApiResponse:
        """Tell one policy."""
        query = asked.query(VersionQuery)
        policy_id = asked.params["policyId"]
        policy = await self._around.store.get_policy(asked.tenant, policy_id, query.version)
        if policy is not None:
            return json_response(200, _view(policy))
        if query.version is None and policy_id in SERVICE_PRESETS:
            return json_response(200, _preset(policy_id))
        newest = await self._around.engine.policies.read(asked.tenant, policy_id)
        if query.version is not None and newest is not None:
            raise problems.not_found(unknown_version(policy_id, query.version, newest.version))
        raise problems.no_such("policy")

    async def delete(self, asked: ApiRequest) -> ApiResponse:
        """Forget a policy."""
        asked.query(NoQuery)
        policy_id = asked.params["policyId"]
        change = await self._around.store.delete_policy(asked.tenant, policy_id)
        self._around.engine.policies.forget(asked.tenant, policy_id)
        if change is PolicyWriteStatus.CONFLICT:
            raise problems.conflict(problem_types.POLICY_IN_USE, _in_use(policy_id))
        if change is PolicyWriteStatus.MISSING:
            if policy_id in SERVICE_PRESETS:
                detail = f"{policy_id} comes with the service; PUT lays a policy of yours over it."
                raise problems.conflict(problem_types.POLICY_BUILT_IN, detail)
            raise problems.no_such("policy")
        return empty_response()

    async def _fields(self, asked: ApiRequest) -> dict[str, Any]:
        body = await asked.json(self._around.limits.max_request_bytes)
        try:
            return _document.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not body.strip():
                raise problems.empty_body() from None
            raise problems.from_decode_error(error, PolicyFields) from None

    async def _write(
        self, tenant: str, policy_id: str, fields: dict[str, Any], *, replace: bool
    ) -> tuple[PolicyWriteStatus, PolicyVersion]:
        checked = check_policy(fields, SERVICE_PRESETS["default"], self._around.limits)
        # In full, so that the same policy is the same text, however it was written.
        document = _encode(policy_to_wire(checked))
        policy = PolicyVersion(tenant=tenant, id=policy_id, version=0, document=document)
        answer = await self._around.store.put_policy(policy, replace=replace)
        self._around.engine.policies.forget(tenant, policy_id)
        return answer


def _in_use(policy_id: str) -> str:
    words = (
        f"Live tasks use {policy_id}: wait until they have ended, or cancel them "
        f"(GET /retry-tasks?policyId={policy_id} lists them)."
    )
    if policy_id == "default":
        words += " PUT /retry-policies/default with {} puts the service's own over it at once."
    return words


def _view(policy: PolicyVersion) -> RetryPolicy:
    document = _document.decode(policy.document)
    return policy_view(policy.id, policy.version, policy.created_at, document)


def _preset(name: str) -> RetryPolicy:
    return policy_view(name, None, None, policy_to_wire(SERVICE_PRESETS[name]))
