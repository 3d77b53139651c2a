"""Texts of the attempt log are encrypted in the store if keys are configured."""

from __future__ import annotations

import asyncio

import msgspec
from cryptography.fernet import Fernet

from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.encryption import Codec
from tarry.service.engine.engine import Engine
from tests.service.engine.harness import BUSY, EngineHarness, FakeTarget


async def test_error_and_excerpt_are_encrypted_in_the_store() -> None:
    """The store gets encrypted texts; events get the texts, and the other fields are readable."""
    codec = Codec([Fernet.generate_key().decode()])
    responses = (
        DeliveryResult(fault=Fault.RESET, error="an error"),
        DeliveryResult(status=500, excerpt=b"an excerpt"),
        BUSY,
    )
    harness = EngineHarness(FakeTarget(*responses))
    harness.context = msgspec.structs.replace(
        harness.context, encrypt_attempt=codec.encrypt_attempt
    )
    harness.engine = Engine(harness.context)
    [task] = await harness.add(harness.new_task(overrides={"maxAttempts": 3, "initialDelayMs": 10}))
    await asyncio.sleep(60)

    stored = await harness.list_attempts(task)
    assert b" e" not in msgspec.msgpack.encode(stored)
    assert [(None, "reset"), (500, None), (503, None)] == [
        (attempt.response_status, attempt.error_class) for attempt in stored
    ]
    assert stored[2].encrypted_texts is None  # there was no text
    texts = [("an error", None), (None, "an excerpt"), (None, None)]
    decrypted = [codec.decrypt_attempt(attempt) for attempt in stored]
    assert texts == [(attempt.error_message, attempt.response_excerpt) for attempt in decrypted]
    published = [event.attempt for event in harness.published if event.attempt is not None]
    assert texts == [(attempt.error_message, attempt.response_excerpt) for attempt in published]
