"""`/signing-secrets`: the secrets that sign the attempts of a tenant (Standard Webhooks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.api import problems
from tarry.service.api.messages import ApiResponse, NoQuery, decode_json, json_response
from tarry.service.api.routing import Operation
from tarry.service.delivery.signing import Signer, derive_public_key, generate_secret
from tarry.service.delivery.targets import parse_lane_name, public_lane_name, stored_lane_name
from tarry.service.model import SigningSecretRecord
from tarry.service.records.signing_secrets import (
    MAX_LANE_SIGNING_SECRETS,
    MAX_SIGNING_SECRETS,
    delete_signing_secret,
    list_signing_secrets,
    put_signing_secret,
)
from tarry.wire.tasks import Page, SigningSecret, SigningSecretRequest

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest

_decoder = msgspec.json.Decoder(SigningSecretRequest)
_PATH = "/signing-secrets"


class SigningSecretResource:
    """The operations on the signing secrets of a tenant."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    @Operation(
        "POST",
        _PATH,
        "createSigningSecret",
        SigningSecret,
        statuses=(201,),
        errors=(409,),
        body=SigningSecretRequest,
    )
    async def create(self, request: ApiRequest) -> ApiResponse:
        """Create a signing secret, which is returned only once. Previous secrets of the same lane
        continue to sign for `expirePreviousMs`.
        """
        context, tenant = self._context, request.tenant
        body = await request.read_body(context.limits.max_request_bytes)
        fields = decode_json(_decoder, body)
        secret = fields.secret or generate_secret(fields.type)
        with problems.convert_errors("secret"):
            Signer([secret])
        with problems.convert_errors("lane"):
            lane = None if fields.lane is None else parse_lane_name(fields.lane)
        record = SigningSecretRecord(
            tenant=tenant,
            id=context.new_id(),
            lane=None if lane is None else stored_lane_name(tenant, lane),
            secret=context.codec.encrypt_secret(secret),
            public_key=derive_public_key(secret),
        )
        stored = await put_signing_secret(
            context.store, record, expire_previous_ms=fields.expire_previous_ms
        )
        context.engine.signers.invalidate(tenant)
        if stored is None:
            detail = (
                f"A tenant can have at most {MAX_SIGNING_SECRETS} signing secrets, and at most "
                f"{MAX_LANE_SIGNING_SECRETS} for the same lane. Delete a secret first."
            )
            raise problems.TOO_MANY_SECRETS.error(detail)
        request.report_change(stored.id, None, _log_fields(stored))
        view = _view(stored)
        if fields.secret is None and stored.public_key is None:
            view.secret = secret
        return json_response(201, view)

    @Operation("GET", _PATH, "listSigningSecrets", Page[SigningSecret])
    async def list_secrets(self, request: ApiRequest) -> ApiResponse:
        """List the signing secrets that have not expired, newest first, without their values."""
        request.parse_query(NoQuery)
        records = await list_signing_secrets(self._context.store, request.tenant)
        return json_response(200, Page(items=list(map(_view, records)), next_cursor=None))

    @Operation("DELETE", f"{_PATH}/{{secretId}}", "deleteSigningSecret", None, statuses=(204,))
    async def delete(self, request: ApiRequest) -> ApiResponse:
        """Delete a signing secret. It signs no more attempts."""
        request.parse_query(NoQuery)
        secret_id = request.path_parameter("secretId")
        secrets = await list_signing_secrets(self._context.store, request.tenant)
        exists = await delete_signing_secret(self._context.store, request.tenant, secret_id)
        self._context.engine.signers.invalidate(request.tenant)
        if not exists:
            raise problems.no_such("signing secret")
        before = next((_log_fields(each) for each in secrets if each.id == secret_id), None)
        request.report_change(secret_id, before, None)
        return ApiResponse(204, b"", [])


def _log_fields(record: SigningSecretRecord) -> dict[str, object]:
    view = _view(record)
    return {"lane": view.lane, "type": view.type, "expiresAt": view.expires_at}


def _view(record: SigningSecretRecord) -> SigningSecret:
    return SigningSecret(
        secret_id=record.id,
        lane=None if record.lane is None else public_lane_name(record.lane),
        type="HMAC" if record.public_key is None else "ED25519",
        created_at=record.created_at,
        expires_at=record.expires_at,
        public_key=record.public_key,
    )
