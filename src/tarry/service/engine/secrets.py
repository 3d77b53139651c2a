"""Secrets in the headers of tasks: a task has the name of a secret, an attempt has its value.

The operator defines the secrets of each tenant in the settings. Values are obtained when an attempt
needs them, and are only in memory. If a value cannot be obtained, the tasks that need it wait: no
attempt is counted, and their lanes are not affected.
"""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

import msgspec

from tarry.service.delivery.secret_sources import SecretUnavailable
from tarry.service.delivery.targets import compile_lane_patterns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tarry.service.delivery import DeliveryResult
    from tarry.service.delivery.secret_sources import SecretSource

_logger = logging.getLogger("tarry.service")
_FIRST_RETRY_PAUSE_S = 1.0
_MAX_RETRY_PAUSE_S = 30.0
_MIN_RENEWAL_INTERVAL_S = 10.0
"""Targets can cause a renewal with a 401. This limits how often they can call a token endpoint."""
_MAX_CONCURRENT_FETCHES = 16
"""Commands and token requests at a time, of all secrets together; files are not limited."""
_MAX_PREVIOUS_TEXTS = 8  # of replaced values, which a target may still return
_MAX_CACHED_LANES = 4096
_UNDEFINED_PAUSE_S = 30.0  # until a task is tried again whose secret the settings do not allow


class ResolvedSecrets(msgspec.Struct, frozen=True):
    """The values for one attempt."""

    headers: dict[str, str]
    """Header values by name, such as `Bearer TOKEN`."""
    texts: tuple[str, ...]
    """Texts to redact in what the target returns: the header values, and the values alone."""

    def __repr__(self) -> str:
        """Return the type alone: asyncio logs representations of results."""
        return "ResolvedSecrets(...)"


class Secret:
    """A secret of one tenant, and its current value.

    `template` has one `{}`, which the value replaces. `targets` are patterns of the lanes
    (`scheme:host:port`) to which the secret may be sent, in which `*` matches any characters.
    `header` is the only header that may have the value: a target may store other headers, and
    return them in a response.
    """

    def __init__(
        self,
        tenant: str,
        name: str,
        source: SecretSource,
        *,
        template: str = "{}",
        targets: Sequence[str] = ("*",),
        header: str = "Authorization",
    ) -> None:
        self.tenant = tenant
        self.name = name
        self.source = source
        self.header = header
        self._before, _, self._after = template.partition("{}")
        self._matches = compile_lane_patterns(tenant, targets)
        self.value: str | None = None  # None: not obtained yet, or rejected by a target
        self.header_value: str = ""
        self.texts: tuple[str, ...] = ()
        """Texts to redact: header value and value, of the current value and of previous values.
        Empty before the value was obtained for the first time."""
        self.refresh_at: float = -inf  # in monotonic seconds, like the times below
        self.expires_at: float = -inf
        self.retry_at: float = -inf  # no earlier fetch after a failure
        self.failure_count: int = 0  # consecutive failures
        self.error: str = ""  # of the last failure
        self.fetch_task: asyncio.Task[None] | None = None
        self.rejected_value: str | None = None  # the last value that was renewed after a 401
        self.renewed_at: float = -inf  # the time of the last renewal after a 401

    def allows(self, lane: str) -> bool:
        """Return whether the secret may be sent to the target of a lane, `tenant/endpoint@key`."""
        return self._matches(lane.partition("@")[0]) is not None

    def allows_header(self, header: str) -> bool:
        """Return whether the secret may be the value of this header."""
        return header.lower() == self.header.lower()

    def is_usable(self, now: float) -> bool:
        """Return whether there is a value that has not expired."""
        return self.value is not None and now < self.expires_at

    def set_value(self, text: str) -> None:
        """Replace the value."""
        self.value = text
        self.header_value = f"{self._before}{text}{self._after}"
        # The newest texts first, also if a source returns to a previous value.
        texts = dict.fromkeys((self.header_value, text, *self.texts))
        self.texts = tuple(texts)[: _MAX_PREVIOUS_TEXTS + 2]


class SecretResolver:
    """The secrets of all tenants. `now` returns monotonic seconds."""

    def __init__(self, secrets: Iterable[Secret], now: Callable[[], float]) -> None:
        self._secrets = {(secret.tenant, secret.name): secret for secret in secrets}
        self._now = now
        self._fetch_slots = asyncio.Semaphore(_MAX_CONCURRENT_FETCHES)
        self._logged_names: set[tuple[str, str]] = set()
        """Secrets of stored tasks that the settings do not allow any more; each is logged once."""
        self._is_empty = not self._secrets
        self._list_cached = lru_cache(_MAX_CACHED_LANES)(self._list_allowed)

    def find(self, tenant: str, name: str) -> Secret | None:
        """Return a secret of a tenant, or None if the settings do not define it."""
        return self._secrets.get((tenant, name))

    def fetch_unknown(self, lane: str) -> None:
        """Start to obtain the secrets of a lane whose values must be redacted but are unknown."""
        if self._is_empty:  # as in most services: saves a lookup for each attempt
            return
        for secret in self._list_cached(lane):
            if not secret.texts and self._now() >= secret.retry_at:
                self._start_fetch(secret)

    def add_texts_of_lane(self, lane: str, result: DeliveryResult) -> None:
        """Add the secrets of all tasks of a lane to those that a result was sent with.

        A caller could send a secret to a target that stores it, and read it with another task.
        """
        if self._is_empty:
            return
        secrets = self._list_cached(lane)
        result.has_unknown_secrets = not all(secret.texts for secret in secrets)
        texts = (text for secret in secrets for text in secret.texts)
        result.sent_secrets = tuple(dict.fromkeys((*result.sent_secrets, *texts)))

    def _list_allowed(self, lane: str) -> list[Secret]:
        return [secret for secret in self._secrets.values() if secret.allows(lane)]

    def get_cached(
        self, tenant: str, lane: str, secret_headers: Mapping[str, str]
    ) -> ResolvedSecrets | None:
        """Return the values for the headers of a task; None if they must be loaded first.

        `secret_headers` has the names of secrets by the names of headers. Raises SecretUnavailable
        if a secret is not allowed, or could not be obtained a short time ago.
        """
        now, is_complete = self._now(), True
        headers: dict[str, str] = {}
        texts: list[str] = []
        for header, name in secret_headers.items():
            secret = self._find_allowed(tenant, lane, header, name)
            if not secret.is_usable(now):
                if now < secret.retry_at:
                    raise SecretUnavailable(secret.error, pause_s=secret.retry_at - now)
                is_complete = False
                continue
            if now >= secret.refresh_at and now >= secret.retry_at:
                self._start_fetch(secret)
            headers[header] = secret.header_value
            texts += (secret.header_value, secret.value or "")
        return ResolvedSecrets(headers, tuple(texts)) if is_complete else None

    async def load(self, tenant: str, names: Iterable[str]) -> None:
        """Obtain the values that are missing or expired, or raise SecretUnavailable.

        A value is obtained once for all callers, even if some of them are cancelled.
        """
        for name in names:
            secret = self._secrets[tenant, name]
            if not secret.is_usable(now := self._now()) and now >= secret.retry_at:
                await asyncio.wait([self._start_fetch(secret)])
            if not secret.is_usable(now := self._now()):
                raise SecretUnavailable(secret.error, pause_s=max(0.0, secret.retry_at - now))

    async def renew(
        self, tenant: str, lane: str, secret_headers: Mapping[str, str], sent: ResolvedSecrets
    ) -> ResolvedSecrets | None:
        """Return newer values, because the target has rejected those of `sent`; None if unchanged.

        A value is renewed at most once, by the first caller. Raises SecretUnavailable if a new
        value cannot be obtained.
        """
        now = self._now()
        for header, name in secret_headers.items():
            secret = self._find_allowed(tenant, lane, header, name)
            if (
                secret.source.is_renewable
                and secret.value is not None
                and secret.header_value == sent.headers[header]
                and secret.value != secret.rejected_value
                and now >= secret.renewed_at + _MIN_RENEWAL_INTERVAL_S
            ):
                secret.rejected_value, secret.value, secret.renewed_at = secret.value, None, now
        await self.load(tenant, secret_headers.values())
        renewed = self.get_cached(tenant, lane, secret_headers)
        return None if renewed is None or renewed.headers == sent.headers else renewed

    def find_unavailable(
        self, tenant: str, lane: str, secret_headers: Mapping[str, str]
    ) -> str | None:
        """Return the name of a secret for which a task waits, as far as this process knows."""
        for header, name in secret_headers.items():
            secret = self.find(tenant, name)
            if secret is None or not (secret.allows(lane) and secret.allows_header(header)):
                return name
            if secret.failure_count and not secret.is_usable(self._now()):
                return name
        return None

    async def close(self) -> None:
        """Cancel the fetches in progress."""
        fetches = [each.fetch_task for each in self._secrets.values() if each.fetch_task]
        for fetch in fetches:
            fetch.cancel()
        if fetches:
            await asyncio.wait(fetches)

    def _find_allowed(self, tenant: str, lane: str, header: str, name: str) -> Secret:
        secret = self.find(tenant, name)
        if secret is not None and secret.allows(lane) and secret.allows_header(header):
            return secret
        if (tenant, name) not in self._logged_names:
            self._logged_names.add((tenant, name))
            message = "tasks wait, because the setting `secrets` %s, tenant=%s secret=%s lane=%s"
            rule = "does not define their secret"
            if secret is not None:
                part = "header" if secret.allows(lane) else "target"
                rule = f"does not allow the {part} of their secret"
            _logger.error(message, rule, tenant, name, lane)
        message = f"the secret {name} is not defined for this target"
        raise SecretUnavailable(message, pause_s=_UNDEFINED_PAUSE_S)

    def _start_fetch(self, secret: Secret) -> asyncio.Task[None]:
        """Return the fetch of a secret that is in progress, or start one."""
        if secret.fetch_task is None:
            secret.fetch_task = asyncio.get_running_loop().create_task(self._fetch(secret))
        return secret.fetch_task

    async def _fetch(self, secret: Secret) -> None:
        """Obtain the value of a secret; log the first failure, and the end of the failures."""
        try:
            if secret.source.is_renewable:
                async with self._fetch_slots:
                    value = await secret.source.fetch()
            else:
                value = await secret.source.fetch()
        except SecretUnavailable as error:
            self._record_failure(secret, str(error))
        except Exception as error:  # noqa: BLE001 - its message may contain the value
            self._record_failure(secret, f"it could not be obtained ({type(error).__name__})")
        else:
            if secret.failure_count:
                message = "secret is available again, tenant=%s secret=%s"
                _logger.warning(message, secret.tenant, secret.name)
            secret.failure_count, secret.retry_at = 0, -inf
            now = self._now()
            secret.set_value(value.text)
            secret.refresh_at = now + value.refresh_after_s
            secret.expires_at = now + value.lifetime_s
        finally:
            secret.fetch_task = None

    def _record_failure(self, secret: Secret, error: str) -> None:
        if not secret.failure_count:
            message = "secret is not available, tenant=%s secret=%s: %s"
            _logger.error(message, secret.tenant, secret.name, error)
        pause_s = _FIRST_RETRY_PAUSE_S * 2.0 ** min(secret.failure_count, 10)
        secret.retry_at = self._now() + min(pause_s, _MAX_RETRY_PAUSE_S)
        secret.failure_count += 1
        secret.error = error
