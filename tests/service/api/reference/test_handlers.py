from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tarry.service.api.problems import PROBLEM_TYPES
from tarry.service.api.reference import handlers
from tests.service.api.harness import ApiHarness


@pytest.mark.parametrize("role", ["all", "api", "worker"])
async def test_page_and_its_files_are_served_without_an_api_key(role: str) -> None:
    """The page allows and uses only files of the service, and has no inline code."""
    api = ApiHarness(role=role, keys=True)
    response = await api.request("GET", "/docs")
    page = response.body.decode()
    assert "text/html; charset=utf-8" == response.header("content-type")
    policy = response.header("content-security-policy") or ""
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert not re.search(r"<style|style=|<script[^>]*>[^<]| on\w+=|https?://", page)
    references = set(re.findall(r'(?:href|src)="([^"#]+)"', page)) - {"data:,"}
    assert {"openapi.json", "docs/swagger-ui-bundle.js"} <= references
    for reference in references:
        assert 200 == (await api.request("GET", f"/{reference}")).status, reference


async def test_problem_types_link_to_their_row_on_the_page(api: ApiHarness) -> None:
    path, _, anchor = (await api.request("GET", "/nothing")).problem["type"].partition("#")
    page = (await api.request("GET", path)).body.decode()
    assert 1 == page.count(f'id="{anchor}"')
    for problem_type in PROBLEM_TYPES:
        assert f'id="{problem_type.type.partition("#")[2]}"' in page


def test_package_of_swagger_ui_is_not_imported() -> None:
    """Reading the files of Swagger UI does not import Flask."""
    code = (
        "import sys; from tarry.service.api.reference.handlers import _read_swagger_ui_file; "
        "assert _read_swagger_ui_file('swagger-ui.css'); "
        "assert not {'flask', 'flask_swagger_ui'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package of Swagger UI, the error in the log says how to install it."""
    monkeypatch.setattr(handlers, "_SWAGGER_UI_PACKAGE", "no_such_package")

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tarry\[service\]'"):
        handlers._read_swagger_ui_file("swagger-ui.css")
