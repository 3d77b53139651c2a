"""Checks of the configuration of Redis: whether acknowledged tasks survive a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_CHECKED_SETTINGS = {
    "appendonly": ("yes", "tasks are lost when the server stops"),
    "appendfsync": ("always", "the tasks of the last second are lost when the machine fails"),
    "maxmemory-policy": ("noeviction", "tasks are deleted when the memory is full"),
}
"""For each setting: the durable value, and what may happen with any other value."""
SETTING_NAMES = tuple(_CHECKED_SETTINGS)


def find_problems(settings: Mapping[str, str]) -> list[str]:
    """Return a message for each setting with which acknowledged tasks may be lost."""
    problems: list[str] = []
    for name, (durable_value, consequence) in _CHECKED_SETTINGS.items():
        value = settings.get(name)
        if value is None:
            problems.append(f"{name} cannot be read: check that it is {durable_value}")
        elif value != durable_value:
            problems.append(f"{name} is {value}: {consequence}. Set it to {durable_value}")
    # Without an append-only file, it does not matter how often the file is synced.
    if settings.get("appendonly") == "no":
        problems = [text for text in problems if not text.startswith("appendfsync")]
    return problems


def parse_config(reply: dict[Any, Any] | list[Any]) -> dict[str, str]:
    """Convert a reply of CONFIG GET, which is a map or a list of names and values."""
    if isinstance(reply, list):
        reply = dict(zip(reply[::2], reply[1::2], strict=True))
    return {_to_text(name): _to_text(value) for name, value in reply.items()}


def _to_text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
