"""A dependency that fails twice and then answers, and one that never does.

Run it: `python examples/flaky.py`. It needs `pip install tarry` and nothing else.
"""

import logging
import random
from collections.abc import Iterator

import tarry

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")

replies: Iterator[str | Exception] = iter(
    [ConnectionError("connection reset"), TimeoutError("no answer"), "42 rows"]
)


@tarry.retry(on=(ConnectionError, TimeoutError), random=random.Random(7))
def load() -> str:
    reply = next(replies)
    if isinstance(reply, Exception):
        raise reply
    return reply


@tarry.retry(on=ConnectionError, attempts=3, random=random.Random(7))
def save() -> None:
    raise ConnectionError("connection refused")


print(load())
try:
    save()
except ConnectionError as error:
    print(f"{error!r}, and its note says:")
    print(*error.__notes__)
