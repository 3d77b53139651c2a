"""Roles of API keys: what the holder of a key may do. Each role includes those before it."""

from __future__ import annotations

from enum import IntEnum


class Role(IntEnum):
    """What an API key may do. `routing.REQUIRED_ROLES` lists the operations of each role."""

    NONE = 0
    """A role that a newer version of the service has stored."""
    READ = 1
    WRITE = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """The name of the role in the API, the store and the command line."""
        return self.name.lower()

    @classmethod
    def parse(cls, label: str) -> Role:
        """Return the role with this label; NONE if there is no such role."""
        return cls[label.upper()] if label in ROLES else cls.NONE


ROLES = ("read", "write", "admin")
"""The labels of all roles that a key can have."""
