"""Processes of two versions on one store: each delivers the tasks of the other.

The newer version is this one with changes: a migration and a new function in PostgreSQL, or other
scripts in Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.postgres_store import new_schema_url
from tests.integration.service import Service, service, target

pytestmark = pytest.mark.timeout(180)

NEW_VERSION = "999.0"
NEW_VERSION_CODE = f"""
from importlib import metadata
metadata.version = lambda _name: "{NEW_VERSION}"

from tarry.service.stores.postgres import live_tasks, schema
from tarry.service.stores.postgres.sql_files import load_schema
header = "CREATE OR REPLACE FUNCTION tarry.claim_1("
claim = header + load_schema().split(header)[1].split("END $$;")[0] + "END $$;"
tables = ("live", "lane", "tenant", "task_key", "content", "finished", "record")
columns = [f"ALTER TABLE tarry.{{name}} ADD COLUMN added integer DEFAULT 7;" for name in tables]
schema.MIGRATIONS += ("".join(columns) + claim.replace("tarry.claim_1(", "tarry.claim_2("),)
live_tasks._CLAIM = live_tasks._CLAIM.replace("claim_1", "claim_2")

from tarry.service.stores.redis import opening, scripts
read = scripts._read
scripts._read = lambda name: read(name) + "-- another version" + chr(10)
opening.SCHEMA_VERSION += 1
"""
"""Runs before the newer version starts."""


@pytest.fixture(params=["postgres", "redis"])
def store_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a store that does not exist yet."""
    if request.param == "postgres":
        yield new_schema_url(request.getfixturevalue("postgres_dsn"))
    else:
        address = request.getfixturevalue("redis_url").replace("unix://", "redis+unix://")
        yield f"{address}?prefix=upgrade"


def test_processes_of_two_versions_share_a_store(tmp_path: Path, store_url: str) -> None:
    """The old version continues and restarts on the new schema, until the new one replaces it."""
    (tmp_path / "sitecustomize.py").write_text(NEW_VERSION_CODE)
    new_version = ("env", f"PYTHONPATH={tmp_path}")
    for name in ("old", "new-api", "new-worker"):
        (tmp_path / name).mkdir()
    with ExitStack() as stack:
        receiver = stack.enter_context(target())

        def run_service(name: str, role: str, *command_prefix: str) -> Service:
            folder, flags = tmp_path / name, ("--role", role)
            return stack.enter_context(
                service(folder, *flags, store=store_url, command_prefix=command_prefix)
            )

        def deliver(api: Service, name: str) -> None:
            tasks = [api.post(targetUrl=f"{receiver.url}/{name}/{n}") for n in range(5)]
            finished = [api.wait_until_finished(each["taskId"]) for each in tasks]
            assert ["SUCCEEDED"] * 5 == [each["status"] for each in finished]

        old = run_service("old", "all")
        deliver(old, "before")
        new_api = run_service("new-api", "api", *new_version)  # upgrades the schema
        deliver(new_api, "by-old-worker")
        old.kill()
        old.start()
        deliver(old, "after-restart")
        run_service("new-worker", "worker", *new_version)
        items = old.request("GET", "/workers")[1]["items"]
        [old_version] = {each["version"] for each in items} - {NEW_VERSION}
        assert old_version != NEW_VERSION
        assert 2 == sum(each["version"] == NEW_VERSION for each in items)
        deliver(old, "with-both")
        assert 0 == old.stop()
        deliver(new_api, "by-new-worker")

        assert 25 == len(receiver.received_requests)
        assert {1} == {len(requests) for requests in receiver.received_requests.values()}
        logs = [(tmp_path / name / "log").read_text() for name in ("old", "new-api", "new-worker")]
        assert not any("Traceback" in log for log in logs)
