"""Type checks of the public API, for mypy and pyright; this module is never run."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Generic, TypeVar, assert_type, overload

import tarry

# --- signatures of decorated functions ------------------------------------------------------------


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
def generator_with_send(number: int) -> Generator[str, bytes, float]:
    sent = yield str(number)
    assert_type(sent, bytes)
    return 1.0


@tarry.retry(on=OSError)
async def async_generator_with_send(number: int) -> AsyncGenerator[str, bytes]:
    sent = yield str(number)
    assert_type(sent, bytes)


@overload
def overloaded(value: int) -> int: ...
@overload
def overloaded(value: str) -> str: ...
@tarry.retry(on=OSError)
def overloaded(value: int | str) -> int | str:
    return value


Item = TypeVar("Item")


@tarry.retry(on=OSError)
def generic(item: Item) -> Item:
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
    def create(cls, number: int) -> "Client":
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


async def check_decorated_functions(client: Client) -> None:
    assert_type(function(1, key="k"), str)
    assert_type(await coroutine(1), str)
    for item in generator(1):
        assert_type(item, str)
    async for item in async_generator(1):
        assert_type(item, str)
    assert_type(client.method(1), str)
    assert_type(await client.async_method(1), str)
    assert_type(client.create(1), Client)
    assert_type(Client.static(1), str)
    assert_type(client.size, int)
    assert_type(generator_with_send(1).send(b""), str)
    assert_type(await async_generator_with_send(1).asend(b""), str)
    assert_type(overloaded(1), int)
    assert_type(overloaded("a"), str)
    assert_type(generic(b"x"), bytes)
    assert_type(Box(1.5).get(), float)


async def check_functions_with_other_options(client: Client) -> None:
    assert_type(tarry.retrying(function, attempts=8)(1, key="k"), str)
    assert_type(await tarry.retrying(coroutine, timeout=None)(1), str)
    assert_type(tarry.retrying(client.method, on=ValueError)(1), str)
    assert_type(await tarry.retrying(client.async_method, deadline=1.0)(1), str)
    assert_type(tarry.retrying(overloaded, attempts=8)("a"), str)
    for item in tarry.retrying(generator, attempts=8)(1):
        assert_type(item, str)
    tarry.retrying(function, attempts=8)("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tarry.retrying(function, attempts="8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tarry.retrying(function, tries=8)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def check_wrong_arguments_are_rejected() -> None:
    tarry.retry(undecorated)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    function("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    function(1, kee="k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# --- calls, attempts and hedges -------------------------------------------------------------------


def undecorated(number: int) -> str:
    return str(number)


async def undecorated_async(number: int) -> str:
    return str(number)


async def check_calls(policy: tarry.Policy) -> None:
    assert_type(tarry.call(undecorated, 1, policy=policy), str)
    assert_type(await tarry.acall(undecorated_async, 1, policy=policy), str)
    assert_type(await tarry.hedge(undecorated_async, 1, after="p95"), str)
    assert_type(tarry.hedge_sync(undecorated, 1, after=0.1), str)


@tarry.retry(on=OSError, fallback=None)
def function_with_fallback(number: int) -> str | None:
    return str(number)


def fallback(error: Exception) -> str:
    return str(error)


async def async_fallback(error: Exception) -> str:
    return str(error)


async def check_fallbacks() -> None:
    assert_type(function_with_fallback(1), str | None)
    assert_type(tarry.call(undecorated, 1, on=OSError, fallback="none"), str)
    assert_type(tarry.call(undecorated, 1, on=OSError, fallback=fallback), str)
    assert_type(tarry.call(undecorated, 1, on=OSError, fallback=None), str | None)
    assert_type(await tarry.acall(undecorated_async, 1, on=OSError, fallback=async_fallback), str)
    assert_type(await tarry.hedge(undecorated_async, 1, after=1, fallback=async_fallback), str)
    assert_type(tarry.hedge_sync(undecorated, 1, after=1, fallback=fallback), str)


def stop(state: tarry.CallState) -> bool:
    assert_type(state.error, Exception)
    return state.elapsed + state.delay > 1.0 or state.attempts > 1


@tarry.retry(on=OSError, stop=stop)
def function_with_stop(number: int) -> str:
    return str(number)


def hook(event: tarry.WillWait) -> None:
    assert_type(event.delay, float)


async def async_hook(event: tarry.WillWait) -> None: ...


@tarry.retry(on=OSError, on_retry=hook)
def function_with_hook(number: int) -> str:
    return str(number)


@tarry.retry(on=OSError, on_retry=async_hook)
async def coroutine_with_hook(number: int) -> str:
    return str(number)


@tarry.retry(on=OSError, on_retry=logging.getLogger("app"))
def function_with_logger(number: int) -> str:
    return str(number)


def classify_error(error: Exception) -> tarry.Outcome:
    return tarry.outcome_of_status(503, {"retry-after": "1"}, now=0.0)


async def async_predicate(value: object) -> bool:
    return value is not None


@tarry.retry(on=async_predicate, until=async_predicate)
async def coroutine_with_async_predicates() -> str:
    return ""


async def check_async_predicates() -> None:
    assert_type(await coroutine_with_async_predicates(), str)
    acall = tarry.acall(undecorated_async, 1, on=async_predicate, until=async_predicate)
    assert_type(await acall, str)


@tarry.retry(on=classify_error, until=lambda result: result is not None)
def function_with_classifier() -> str | None:
    return None


async def check_wrong_calls_are_rejected(policy: tarry.Policy) -> None:
    tarry.call(undecorated, "1", policy=policy)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tarry.retry(on="OSError")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tarry.retry(on=KeyboardInterrupt)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await tarry.hedge(undecorated_async, 1, policy=policy)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tarry.Policy(attempts=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tarry.Breaker(fail_max=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await tarry.hedge(undecorated_async, 1, timeout=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    tarry.Policy(jitter="ful")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def check_attempts() -> None:
    for attempt in tarry.attempts(on=OSError):
        with attempt:
            undecorated(1)
    async for attempt in tarry.attempts(on=OSError, until=bool):
        async with attempt:
            attempt.set_result(await undecorated_async(1))


# --- types for functions of users -----------------------------------------------------------------


def retry_errors(on: tarry.On = OSError, listener: tarry.Listener | None = None) -> tarry.Decorator:
    if listener is not None:
        tarry.listen(listener)
    return tarry.retry(on=on)


def retry_async_errors(on: tarry.AsyncOn) -> tarry.Decorator:
    return tarry.retry(on=on)


def http_attempts(on: tarry.On | None = None) -> tarry.Attempts:
    return tarry.attempts(on=on or OSError, attempts=3)


def report_attempt(attempt: tarry.AttemptContext) -> int:
    return attempt.number


@retry_errors((OSError, ValueError))
def function_with_own_decorator(number: int) -> str:
    return str(number)


def check_own_functions() -> None:
    assert_type(function_with_own_decorator(1), str)
    for attempt in http_attempts():
        with attempt:
            assert_type(report_attempt(attempt), int)
    retry_errors("OSError")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# --- values ---------------------------------------------------------------------------------------

assert_type(tarry.parse_retry_after("120", now=0.0), float | None)
assert_type(tarry.remaining(), float | None)
assert_type(tarry.current_attempt(), int)
assert_type(tarry.record_of(OSError()), tarry.CallRecord | None)
with tarry.record_calls() as records:
    assert_type(records, list[tarry.CallRecord])
payments = tarry.Downstream("payments", breaker=tarry.Breaker(), budget=tarry.TokenBudget())
