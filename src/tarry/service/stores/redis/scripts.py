"""The Lua scripts of the Redis store. Each operation on a partition is one script.

A script is a file in `lua`; its header lists its arguments and its reply. The shared files that its
first line names are put in front of it, and `identity.lua` in front of all. Redis executes them
with each call, which takes about 30 us.
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
    parts = dict.fromkeys(("identity", *_list_parts(name)))
    encoded = "".join(map(_read, parts)).encode()
    return Script(encoded, sha1(encoded, usedforsecurity=False).hexdigest())


def _list_parts(name: str) -> list[str]:
    """Return the names of the files that a file uses, in order, and its own name."""
    first_line = _read(name).partition("\n")[0]
    used = first_line.removeprefix(_USES).split() if first_line.startswith(_USES) else []
    return [part for each in used for part in _list_parts(each)] + [name]


def _read(name: str) -> str:
    path = files("tarry.service.stores.redis") / "lua" / f"{name}.lua"
    return path.read_text(encoding="utf-8").replace(_CONSTANTS, lua_constants())
