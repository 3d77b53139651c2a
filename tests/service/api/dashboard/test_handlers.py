from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest

from tarry.core.verdict import Reason
from tests.service.api.harness import ApiHarness

ASSETS = sorted(
    file.name
    for file in files("tarry.service.api.dashboard").joinpath("assets").iterdir()
    if file.name != "index.html"
)


def test_dead_letters_can_be_filtered_by_every_reason() -> None:
    """The page Dead letters offers the reasons that the API accepts."""
    assets = files("tarry.service.api.dashboard").joinpath("assets")
    match = re.search(
        r"const REASONS = (.+);", assets.joinpath("dead_letters.js").read_text("utf-8")
    )
    assert match is not None
    reasons = json.loads(match[1])
    assert sorted(Reason) == sorted(reasons)


async def test_page_has_a_strict_content_security_policy(api: ApiHarness) -> None:
    """The page allows only its own files, no inline scripts or styles, and no frames."""
    response = await api.request("GET", "/")
    policy = response.header("content-security-policy") or ""
    assert 200 == response.status
    assert "text/html; charset=utf-8" == response.header("content-type")
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "no-referrer" == response.header("referrer-policy")
    assert "nosniff" == response.header("x-content-type-options")


async def test_page_refers_only_to_its_own_files(api: ApiHarness) -> None:
    """The page and its modules have relative links to files that exist, and no inline code."""
    page = (await api.request("GET", "/")).body.decode()
    references = re.findall(r'(?:href|src)="([^"#]+)"', page)
    for name in ASSETS:
        text = (await api.request("GET", f"/dashboard/{name}")).body.decode()
        references += [f"dashboard/{module}" for module in re.findall(r'from "\./(.+?)"', text)]
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    assert "dashboard/main.js" in references
    for reference in set(references):
        assert 200 == (await api.request("GET", f"/{reference}")).status, reference
    assert not re.search(r"<style|style=|<script[^>]*>[^<]| on\w+=", page)


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/dashboard/main.js", "text/javascript; charset=utf-8"),
        ("/dashboard/style.css", "text/css; charset=utf-8"),
        ("/dashboard/icon.svg", "image/svg+xml"),
    ],
)
async def test_files_are_cached_and_revalidated(
    api: ApiHarness, path: str, media_type: str
) -> None:
    """A file has an ETag; a request with it gets 304 without a body, and HEAD only the headers."""
    response = await api.request("GET", path)
    etag = response.header("etag") or ""
    assert (200, media_type) == (response.status, response.header("content-type"))
    assert ("no-cache", str(len(response.body))) == (
        response.header("cache-control"),
        response.header("content-length"),
    )
    for known in (etag, f'"other", W/{etag}'):
        unchanged = await api.request("GET", path, headers={"If-None-Match": known})
        assert (304, b"", etag) == (unchanged.status, unchanged.body, unchanged.header("etag"))
    changed = await api.request("GET", path, headers={"If-None-Match": '"other"'})
    assert (200, response.body) == (changed.status, changed.body)
    head = await api.request("HEAD", path)
    assert (200, b"") == (head.status, head.body)
    assert response.header("content-length") == head.header("content-length")


@pytest.mark.parametrize("keys", [False, True])
async def test_page_says_whether_an_api_key_is_required(keys: bool) -> None:
    """The page can ask for an API key before its first request to the API."""
    api = ApiHarness(keys=keys)
    page = (await api.request("GET", "/")).body.decode()
    assert (f'data-api-keys="{"required" if keys else "optional"}"') in page


async def test_worker_has_no_dashboard() -> None:
    """A process with the role `worker` names the roles that serve the dashboard."""
    api = ApiHarness(role="worker")
    response = await api.request("GET", "/")
    assert 421 == response.status
    assert "role api or all" in response.problem["detail"]
    assert 404 == (await api.request("GET", "/dashboard/main.js")).status


@pytest.mark.parametrize("path", ["/dashboard/index.html", "/dashboard/../auth.py"])
async def test_other_files_are_not_served(api: ApiHarness, path: str) -> None:
    """Only the files of the dashboard have a path."""
    assert 404 == (await api.request("GET", path)).status


@pytest.mark.parametrize(("path", "location"), [("/dashboard", "./"), ("/dashboard/", "../")])
async def test_dashboard_paths_redirect_to_the_page(path: str, location: str) -> None:
    """`/dashboard` redirects to the page, also behind a proxy that adds a prefix to the path."""
    api = ApiHarness(keys=True)
    response = await api.request("GET", path)
    assert (307, location) == (response.status, response.header("location"))
