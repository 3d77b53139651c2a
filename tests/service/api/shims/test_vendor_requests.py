"""The code that the shims share."""

from __future__ import annotations

import pytest

from tarry.service.api.problems import ApiError, invalid
from tarry.service.api.shims.vendor_requests import build_task_request, rename_fields, vendor_error


def test_fields_get_the_names_of_the_vendor() -> None:
    """The detail and the field of an error name the vendor's field, with its place."""
    with (
        pytest.raises(ApiError) as caught,
        rename_fields({"targetUrl": "url"}.__getitem__, "[3] "),
    ):
        raise invalid("targetUrl", "must be a URL", "x")

    problem = caught.value.problem
    assert "[3] url must be a URL, got 'x'." == problem.detail
    assert (422, "[3] url") == (problem.status, problem.extensions["field"])


def test_errors_without_a_field_are_not_changed() -> None:
    """An error that is not about a field is passed on."""
    error = vendor_error(409, "The task exists.")

    with pytest.raises(ApiError) as caught, rename_fields(str.upper):
        raise error

    assert error is caught.value


def test_limits_of_fields_are_checked() -> None:
    """A field that `POST /retry-tasks` would reject is rejected."""
    with pytest.raises(ApiError, match="idempotencyKey"):
        build_task_request({"targetUrl": "https://example.com", "idempotencyKey": "x" * 256})
