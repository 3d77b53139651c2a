"""Which error to raise instead of an error of the driver or of a script."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tarry.errors import StoreUnavailable
from tarry.service.store import StoreLost

if TYPE_CHECKING:
    from tarry.service.stores.redis.cluster import NodeAddress

_SCRIPT_FAILURE = "user_script"
"""Part of each error that a script has raised, or a command in a script."""
# Errors in a script that depend on the state of the server, not on the arguments of the script. The
# driver does not recognize them. The last three have no code: a command is not permitted, in Redis
# 6.2 and later, and SCRIPT KILL.
_TEMPORARY_ERROR = re.compile(
    r"\b(READONLY|OOM|MISCONF|NOREPLICAS|LOADING|CLUSTERDOWN|MASTERDOWN|BUSY|TRYAGAIN|MISSINGKEY"
    r"|NOPERM|NOAUTH|WRONGPASS|UNKILLABLE|EXECABORT"
    r"|can't run this command|ACL failure|Script killed)\b"
)
_UNTRUSTED_CERTIFICATE = re.compile(r"verify failed: (self.signed|unable to get \w* ?issuer)")
_STORE_LOST = "STORELOST "
"""Precedes the prefix of a partition in the error of `identity.lua`."""
_MISSING_KEY = "MISSINGKEY "
"""Precedes the name of a key in the error of a script that cannot continue without the key."""


class ErrorTranslator:
    """Translates errors into `StoreUnavailable`.

    `errors` are the error classes of the driver. `server_name` is the beginning of messages.
    """

    def __init__(self, errors: Any, server_name: str, *, is_cluster: bool) -> None:
        self._errors = errors
        self._server_name = server_name
        self._is_cluster = is_cluster

    def translate(
        self, error: Exception, identity: str, address: NodeAddress | None = None
    ) -> StoreUnavailable | None:
        """Return the error to raise instead, or None: the caller has made a mistake.

        `identity` is that of the store. `address` is the node of a Cluster that the message names.
        """
        if isinstance(error, self._errors.NoScriptError):
            return None
        text = str(error)
        if _STORE_LOST in text:
            return self._describe_loss(text, identity)
        if not self._is_temporary(error):
            return None
        if _MISSING_KEY in text:
            return _describe_missing_key(text)
        return self.unavailable(self._describe(error), address)

    def unavailable(self, reason: str, address: NodeAddress | None = None) -> StoreUnavailable:
        """Return an error with this reason."""
        if address is not None and str(address) not in reason:
            reason = f"node {address}: {reason}"
        return StoreUnavailable(f"{self._server_name} is unavailable: {reason}")

    def _is_temporary(self, error: Exception) -> bool:
        """Return whether an error depends on the server, not on the arguments of a script."""
        errors = self._errors
        if isinstance(error, errors.ResponseError):
            # All other responses depend on the state of the server, such as its memory, its role or
            # the permissions of the user. Results of attempts have to be written again, and must
            # not be discarded.
            # The driver has a class for some of them, and removes their code from the message.
            has_code = type(error) is not errors.ResponseError
            is_script_failure = _SCRIPT_FAILURE in str(error) and not has_code
            return not is_script_failure or _TEMPORARY_ERROR.search(str(error)) is not None
        if isinstance(error, RuntimeError):
            # The driver writes to a pooled connection that was reset a moment ago. asyncio accepts
            # the bytes and the next read fails, but uvloop raises this error.
            return "handler is closed" in str(error)
        return isinstance(error, (errors.RedisError, OSError, TimeoutError))

    def _describe(self, error: Exception) -> str:
        """Return the reason of a temporary error."""
        if isinstance(error, TimeoutError):
            return "no reply in time"
        if isinstance(error, self._errors.MovedError) and not self._is_cluster:
            return "the server is a node of a Cluster: use redis+cluster://HOST in `store`"
        reason = str(error) or type(error).__name__
        if _UNTRUSTED_CERTIFICATE.search(reason) is not None:
            reason += " If the server has a private authority, add ?ssl_ca_certs=FILE to the URL."
        return reason

    def _describe_loss(self, text: str, identity: str) -> StoreLost:
        """Convert the error of `identity.lua`: the prefix of a partition, and its identity."""
        prefix, _, found = text.partition(_STORE_LOST)[2].partition(" ")
        if found:
            return StoreLost(
                f"{prefix} on {self._server_name} has been replaced by the data of another store, "
                "and nothing is written to it: restore the data of this store, or restart this "
                "process to use the other store"
            )
        return StoreLost(
            f"{prefix} on {self._server_name} is empty, so its tasks and API keys are lost, and "
            "nothing is written to it. It was flushed, or an empty replica became the primary. "
            "Restore it from a backup, or accept the loss: see `tarry docs redis`, identity="
            f"{identity}"
        )


def _describe_missing_key(text: str) -> StoreUnavailable:
    key = text.partition(_MISSING_KEY)[2].partition(" script: ")[0]  # added by Redis 7
    msg = f"Redis key {key} is missing, evicted or deleted by mistake, and other keys refer"
    return StoreUnavailable(f"{msg} to it: restore it from a backup, see `tarry docs redis`")
