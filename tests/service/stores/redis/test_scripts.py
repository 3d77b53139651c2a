"""The files of the scripts."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files

import pytest

from tarry.service.stores.redis.scripts import load_script

SHARED = {
    *("audit", "context", "identity", "lookup", "lost_tasks", "rebuild", "records", "replays"),
    *("rotation", "schema", "keyed", "tasks"),
}
NAMES = sorted(
    path.name.removesuffix(".lua")
    for path in (files("tarry.service.stores.redis") / "lua").iterdir()
)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*SHARED, "peek"}])
def test_a_script_begins_with_the_files_that_it_uses(name: str) -> None:
    """Shared files are put in front of a script, and its digest is that of the whole text."""
    script = load_script(name)
    identity, _, rest = script.source.partition(b"-- Shared by all scripts")
    assert load_script("peek").source.startswith(identity)
    assert rest
    assert sha1(script.source, usedforsecurity=False).hexdigest() == script.digest
    assert b"--! uses records" in script.source


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_short(name: str) -> None:
    """Lines of scripts have at most 100 characters, like lines of Python."""
    text = (files("tarry.service.stores.redis") / "lua" / f"{name}.lua").read_text()
    assert [] == [line for line in text.splitlines() if len(line) > 100]
