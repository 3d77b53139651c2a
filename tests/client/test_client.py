"""Construction of the clients, and invalid arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from tarry.client import AsyncClient, Client, client
from tarry.client.errors import NotFound
from tarry.errors import ConfigurationError
from tests.client.fake_service import FakeService, task_json

CLIENTS = [Client, AsyncClient]
URL = "http://127.0.0.1:8080"


@pytest.mark.parametrize("client_type", CLIENTS)
@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("127.0.0.1:8080", {}, "url must be the address"),
        ("ftp://host", {}, "url must be the address"),
        ("http://", {}, "url must be the address"),
        ("http://user:secret@host", {}, "url must be the address"),
        ("http://host?key=secret", {}, "url must be the address"),
        ("http://host:port", {}, "url must be the address"),
        ("http://[::1", {}, "url must be the address"),
        (None, {}, "url must be the address"),
        (URL, {"key": "a\r\nb: c"}, "key must be an API key"),
        (URL, {"key": 7}, "key must be an API key"),
        (URL, {"timeout": 0}, "timeout must be greater than 0, got 0"),
        (URL, {"policy": {"max_attempts": 3}}, "policy must be"),
    ],
)
def test_invalid_arguments_are_rejected(
    client_type: type[Any], url: Any, options: dict[str, Any], message: str
) -> None:
    """Invalid arguments are rejected, and the error contains no secret."""
    with pytest.raises(ConfigurationError, match=message) as caught:
        client_type(url, **options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "..", None, 7])
def test_invalid_ids_are_rejected(name: Any) -> None:
    """An invalid id is rejected, because it could change the path of a request."""
    with Client(URL) as client:
        for call in (client.get, client.pause, client.policy):
            with pytest.raises(ConfigurationError, match="must be a non-empty name"):
                call(name)


def test_id_with_a_slash_sends_no_request() -> None:
    """An id with a slash raises an error without a request, because no such id exists."""
    with Client(URL) as client:
        for call, kind in (
            (client.get, "task"),
            (client.cancel, "task"),
            (client.policy, "policy"),
            (client.delete_policy, "policy"),
            (client.delete_signing_secret, "secret"),
        ):
            with pytest.raises(NotFound, match=rf"^There is no such {kind}: '\.\./x' has a slash"):
                call("../x")
        with pytest.raises(
            ConfigurationError, match=r"^policy_id must contain only letters, digits"
        ):
            client.put_policy("../x", {})


def test_blocking_client_is_generated_from_the_asynchronous_client() -> None:
    """If this fails, change async_client.py and run `make client`."""
    script = Path(__file__).parents[2] / ".ci" / "generate_client.py"
    generated = subprocess.run(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert generated == Path(client.__file__).read_text("utf-8")


@pytest.mark.parametrize("package", ["httpx", "msgspec"])
@pytest.mark.parametrize("name", ["Client", "AsyncClient"])
def test_missing_package_raises_missing_extra(package: str, name: str) -> None:
    """Without httpx or msgspec, creating a client raises MissingExtra."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from tarry.client import {name}\n{name}('{URL}')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    expected = (
        "tarry.errors.MissingExtra: tarry.client needs httpx and msgspec: "
        "pip install 'tarry[client]'"
    )
    assert expected == result.stderr.splitlines()[-1]


def test_import_loads_no_third_party_module() -> None:
    """Importing the clients loads neither httpx, msgspec nor asyncio."""
    code = (
        "import sys\nfrom tarry.client import AsyncClient, Client\n"
        "print(*{'httpx', 'msgspec', 'asyncio'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "" == result.stdout.strip()


HOOK = "https://example.com/hook"


@pytest.mark.usefixtures("_no_wait")
def test_async_client_on_trio(service: FakeService) -> None:
    """Retries, pages and waits work on trio as on asyncio."""
    statuses = iter(["PENDING", "SUCCEEDED"])
    service.responses["GET /retry-tasks/a"] = lambda _: (200, task_json(1, status=next(statuses)))
    service.responses["GET /retry-tasks"] = (200, {"items": [task_json(1)], "nextCursor": None})
    service.faults.append("drop")

    async def main() -> None:
        async with AsyncClient(service.url) as client:
            task = await client.enqueue(HOOK)
            assert [task.idempotency_key] == list(service.tasks)
            assert "SUCCEEDED" == (await client.wait("a")).status
            assert [task.task_id] == [listed.task_id async for listed in client.tasks()]

    trio.run(main)
    assert 5 == len(service.requests)
