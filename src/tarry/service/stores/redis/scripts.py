"""The Lua scripts of the Redis store. Each operation on a partition is one script.

A script is a file in `lua`. `identity.lua` is prepended, and shared files that its first line
names. Redis executes them with each call, which takes about 30 us.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

from tarry.service.rules.transitions import lua_constants

_USES = "--! uses "
_CONSTANTS = "--! constants\n"
"""The line that is replaced by constants which other engines use, too."""


class Script(NamedTuple):
    """The source of a script, and the digest by which a server finds it in its cache."""

    source: bytes
    digest: str


@cache
def load_script(name: str) -> Script:
    """Return the script with this name."""
    source = _read(name)
    first_line = source.partition("\n")[0]
    used = first_line.removeprefix(_USES).split() if first_line.startswith(_USES) else []
    complete = "".join(_read(part) for part in ("identity", *used)) + source
    encoded = complete.encode()
    return Script(encoded, sha1(encoded, usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    path = files("tarry.service.stores.redis") / "lua" / f"{name}.lua"
    return path.read_text(encoding="utf-8").replace(_CONSTANTS, lua_constants())
