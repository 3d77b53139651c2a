"""The public names as type checkers see them; checked by mypy and pyright, never run."""

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Generic, TypeVar, assert_type, overload

import tarry

# --- the decorator keeps signatures ---------------------------------------------------------------


@tarry.retry(on=OSError, attempts=4)
def function(number: int, *, key: str = "") -> str:
    return str(number) + key


@tarry.retry(on=(OSError, ValueError), timeout=2.0, deadline=10.0)
async def coroutine(number: int) -> str:
    return str(number)


@tarry.retry(on=lambda error: isinstance(error, OSError))
def generator(number: int) -> Iterator[str]:
    yield str(number)


@tarry.retry(on=OSError)
async def async_generator(number: int) -> AsyncIterator[str]:
    yield str(number)


@tarry.retry(on=OSError)
def two_way(number: int) -> Generator[str, bytes, float]:
    sent = yield str(number)
    assert_type(sent, bytes)
    return 1.0


@tarry.retry(on=OSError)
async def async_two_way(number: int) -> AsyncGenerator[str, bytes]:
    sent = yield str(number)
    assert_type(sent, bytes)


@overload
def either(value: int) -> int: ...
@overload
def either(value: str) -> str: ...
@tarry.retry(on=OSError)
def either(value: int | str) -> int | str:
    return value


Item = TypeVar("Item")


@tarry.retry(on=OSError)
def same(item: Item) -> Item:
    return item


class Box(Generic[Item]):
    def __init__(self, item: Item) -> None:
        self.item = item

    @tarry.retry(on=OSError)
    def get(self) -> Item:
        return self.item


class Client:
    @tarry.retry(on=OSError)
    def method(self, number: int) -> str:
        return str(number)

    @classmethod
    @tarry.retry(on=OSError)
    def made(cls, number: int) -> "Client":
        return cls()

    @staticmethod
    @tarry.retry(on=OSError)
    def static(number: int) -> str:
        return str(number)

    @property
    @tarry.retry(on=OSError)
    def size(self) -> int:
        return 1

    @tarry.retry(on=OSError)
    async def async_method(self, number: int) -> str:
        return str(number)


async def decorated(client: Client) -> None:
    assert_type(function(1, key="k"), str)
    assert_type(await coroutine(1), str)
    for item in generator(1):
        assert_type(item, str)
    async for item in async_generator(1):
        assert_type(item, str)
    assert_type(client.method(1), str)
    assert_type(await client.async_method(1), str)
    assert_type(client.made(1), Client)
    assert_type(Client.static(1), str)
    assert_type(client.size, int)
    assert_type(two_way(1).send(b""), str)
    assert_type(await async_two_way(1).asend(b""), str)
    assert_type(either(1), int)
    assert_type(either("a"), str)
    assert_type(same(b"x"), bytes)
    assert_type(Box(1.5).get(), float)


def wrong_arguments_are_seen() -> None:
    tarry.retry(plain)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    function("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    function(1, kee="k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# --- calls, attempts, hedges ----------------------------------------------------------------------


def plain(number: int) -> str:
    return str(number)


async def plain_async(number: int) -> str:
    return str(number)


async def calls(policy: tarry.Policy) -> None:
    assert_type(tarry.call(plain, 1, policy=policy), str)
    assert_type(await tarry.acall(plain_async, 1, policy=policy), str)
    assert_type(await tarry.hedge(plain_async, 1, after="p95"), str)
    assert_type(tarry.hedge_sync(plain, 1, after=0.1), str)


def seen_by_on(error: Exception) -> tarry.Outcome:
    return tarry.outcome_of_status(503, {"retry-after": "1"}, now=0.0)


@tarry.retry(on=seen_by_on, until=lambda result: result is not None)
def classified() -> str | None:
    return None


async def wrong_calls_are_seen(policy: tarry.Policy) -> None:
    tarry.call(plain, "1", policy=policy)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tarry.retry(on="OSError")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tarry.retry(on=KeyboardInterrupt)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await tarry.hedge(plain_async, 1, policy=policy)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tarry.Policy(jitter="ful")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def attempts() -> None:
    for attempt in tarry.attempts(on=OSError):
        with attempt:
            plain(1)
    async for attempt in tarry.attempts(on=OSError):
        with attempt:
            await plain_async(1)


# --- values ---------------------------------------------------------------------------------------

assert_type(tarry.parse_retry_after("120", now=0.0), float | None)
assert_type(tarry.remaining(), float | None)
assert_type(tarry.record_of(OSError()), tarry.CallRecord | None)
payments = tarry.Downstream("payments", breaker=tarry.Breaker(), budget=tarry.TokenBudget())
