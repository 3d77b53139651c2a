"""The stored form of tasks."""

from __future__ import annotations

import re
from importlib.resources import files

import msgspec
import pytest

from tarry.errors import ConfigurationError
from tarry.service.store import NewTask
from tarry.service.stores.records import encode
from tarry.service.stores.redis.codec import (
    TaskState,
    decode_task,
    encode_fixed,
    pack_id,
    pack_ids,
    task_arguments,
    to_raw,
    unpack_id,
)
from tests.service.stores.harness import START_MS, task, task_id


def test_bytes_are_encoded_as_strings() -> None:
    """Scripts know no binary data, so bytes of any length are encoded as a MessagePack string."""
    for size in (0, 1, 31, 32, 255, 256, 70_000):
        encoded = encode(to_raw(b"a" * size))
        assert "a" * size == msgspec.msgpack.decode(encoded, type=str)
    assert bytes([0xA2, 0xFF, 0x00]) == encode(to_raw(b"\xff\x00"))


def test_ids_are_packed_into_16_bytes() -> None:
    """A packed id is unpacked to the same text; malformed ids are left out."""
    packed = pack_id(task_id(7))
    assert packed is not None
    encoded = encode(packed)
    assert (17, task_id(7)) == (len(encoded), unpack_id(encoded[1:]))
    assert [packed] == pack_ids(["unknown", task_id(7), task_id(7).upper()[:-1] + "G", ""])


def test_a_task_is_decoded_from_its_parts() -> None:
    """A task has the fields of its state and of the part that never changes."""
    stored = task(1, key="kä", fingerprint=b"\xff", packed_content=b"\x00c", owned_body_ref="ref")
    state = {"n": 9, "l": 1, "p": 2, "c": START_MS, "d": START_MS + 5, "f": 5, "i": 0, "s": 0}
    packed_id = encode(pack_id(stored.id))[1:]
    values = [packed_id, encode(state), encode_fixed(stored), stored.lane.encode(), b"default"]

    number, decoded = decode_task(values)

    assert 9 == number
    stored.set_added(START_MS, START_MS + 5)
    assert stored == decoded


def test_the_scripts_name_the_fields_of_a_state_likewise() -> None:
    """The table in `tasks.lua` has the fields of `TaskState`: stored name, then name."""
    text = (files("tarry.service.stores.redis") / "lua" / "tasks.lua").read_text()
    rows = re.findall(r"^--   .*", text, re.MULTILINE)
    table = re.findall(r"\b([a-z]) ([a-z_]{4,})", " ".join(rows))
    fields = msgspec.structs.fields(TaskState)
    assert sorted((field.encode_name, field.name) for field in fields) == sorted(table)


def test_a_key_that_is_the_id_is_not_stored_twice() -> None:
    """Without a caller's key, the key is the id, which is not stored again."""
    stored = task(1, key=task_id(1))
    other = task(1, key=task_id(2))
    assert len(encode_fixed(other)) - len(encode_fixed(stored)) > 30
    arguments = task_arguments(NewTask(stored))
    assert arguments[0] == arguments[5]


def test_the_id_of_a_task_is_a_uuid() -> None:
    """A task with another id is rejected before a script runs."""
    new_task = task(1)
    new_task.id = "unknown"
    with pytest.raises(ConfigurationError, match="id must be a UUID"):
        task_arguments(NewTask(new_task))
