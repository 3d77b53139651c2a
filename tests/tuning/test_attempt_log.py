"""Attempt logs: both formats, and errors that name the file and the line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.outcome import Kind
from tarry.errors import ConfigurationError
from tarry.tuning import attempt_log as module
from tarry.tuning.attempt_log import (
    MAX_LINE_BYTES,
    OUTCOME_KINDS,
    AttemptLog,
    LoggedAttempt,
    read_attempt_log,
)
from tests.tuning.builders import EPOCH, HEADER, LogModel, write_csv, write_jsonl

if TYPE_CHECKING:
    from pathlib import Path

START_MS = f"{EPOCH * 1000:.0f}"
ROW = f"a,1,{START_MS},12.5,success"
OBJECT = (
    f'{{"taskId":"a","attemptNumber":1,"startedAt":{START_MS},'
    '"durationMs":12.5,"outcome":"success"}'
)


def read_text(tmp_path: Path, text: str | bytes, name: str = "log.csv") -> AttemptLog:
    """Read a log with this content."""
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_attempt_log(path)


def outcome_kinds(log: AttemptLog) -> list[Kind]:
    """Return the kind of each outcome."""
    return [OUTCOME_KINDS[kind] for kind in log.kinds]


def test_csv_and_jsonl_give_the_same_log(tmp_path: Path) -> None:
    model = LogModel(calls=50)
    first = read_attempt_log(write_csv(tmp_path / "log.csv", model.attempts()))
    second = read_attempt_log(write_jsonl(tmp_path / "log.jsonl", model.attempts()))

    for name in AttemptLog.__slots__:
        assert getattr(first, name) == getattr(second, name)


def test_lost_attempts_are_skipped(tmp_path: Path) -> None:
    """An exported log may have attempts that were lost in a crash, without a duration."""
    lost = OBJECT.replace("12.5", "null").replace("success", "lost")
    log = read_text(tmp_path, f"{OBJECT}\n{lost}\n", "log.jsonl")

    assert [Kind.SUCCESS] == outcome_kinds(log)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.txt", f"{HEADER}\n{ROW}\n"),
        ("log.CSV", f"{HEADER}\n{ROW}\n"),
        ("log", f"\n{OBJECT}\n"),
        ("log.ndjson", f"{OBJECT}\n\n{OBJECT}\n"),
        ("bom.csv", f"\ufeff{HEADER}\r\n{ROW}\r\n"),
        ("bom.log", f"\ufeff{OBJECT}\n"),
        ("no-final-newline.jsonl", OBJECT),
        ("snake.csv", f"task_id,attempt_number,started_at,duration_ms,outcome\n{ROW}\n"),
        ("spaces.csv", f"{HEADER.replace(',', ' , ')}\n{ROW.replace(',', ' , ')}\n"),
        ("additional-column.csv", f'{HEADER},errorMessage\n{ROW},"two\nlines, quoted"\n'),
        ("floats.csv", f"{HEADER}\na,1.0,{START_MS}.25,1.25e1,SUCCESS\n"),
    ],
)
def test_format_variations_are_accepted(tmp_path: Path, name: str, text: str) -> None:
    """A byte order mark, CRLF, snake case, spaces, and additional columns are accepted."""
    log = read_text(tmp_path, text, name)

    assert (1, 0.0125, Kind.SUCCESS) == (log.numbers[0], log.durations[0], outcome_kinds(log)[0])
    assert EPOCH == int(log.starts[0])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("200", Kind.SUCCESS),
        ("301", Kind.SUCCESS),
        ("404", Kind.PERMANENT),
        ("429", Kind.THROTTLED),
        ("503.0", Kind.TRANSIENT),
        ("", Kind.TRANSIENT),
    ],
)
def test_outcome_follows_from_the_status(tmp_path: Path, status: str, kind: Kind) -> None:
    """Without an outcome the status is classified; a missing status is a transient failure."""
    header = HEADER.replace("outcome", "responseStatus")

    assert [kind] == outcome_kinds(read_text(tmp_path, f"{header}\na,1,{START_MS},1,{status}\n"))
    assert [kind] == outcome_kinds(
        read_text(tmp_path, f"{HEADER},responseStatus\na,1,{START_MS},1,,{status}")
    )


def test_outcome_has_precedence_over_status(tmp_path: Path) -> None:
    """The outcome "overloaded" counts although the status is 503."""
    text = f"{HEADER},responseStatus\na,1,{START_MS},1,overloaded,503\n"

    assert [Kind.OVERLOADED] == outcome_kinds(read_text(tmp_path, text))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=20))
def test_attempts_are_sorted(pairs: list[tuple[int, int]]) -> None:
    """Attempts are sorted by start, and by number if they start together."""
    log = AttemptLog(
        LoggedAttempt("a", number, float(start), 10.0 * start + number, Kind.SUCCESS)
        for start, number in pairs
    )

    assert sorted(pairs) == list(zip(map(int, log.starts), log.numbers, strict=True))
    assert [10.0 * start + number for start, number in sorted(pairs)] == list(log.durations)


INVALID_LOGS = [
    ("empty.csv", "", ": the log has no attempts: the file is empty"),
    ("empty.jsonl", "", ": the log has no attempts: the file is empty"),
    ("blank", "\n \n", ": the log has no attempts: only a header or blank lines"),
    ("h.csv", f"{HEADER}\n", ": the log has no attempts: only a header or blank lines"),
    (
        "m.csv",
        "taskId,startedAt\na,1",
        ":1: column attemptNumber is missing; there are 'taskId', 's",
    ),
    ("s.csv", HEADER.replace(",", ";"), ":1: column taskId is missing; there are 'taskId;att"),
    ("o.csv", HEADER.replace("outcome", "x"), ":1: column outcome or responseStatus is missing"),
    ("t.csv", f"{HEADER},task_id\n{ROW},b", ":1: column taskId appears twice"),
    ("few.csv", f"{HEADER}\n{ROW}\na,1\n", ":3: must have 5 columns as the first line has, got 2"),
    ("q.csv", f'{HEADER}\n"a"b,1,{START_MS},1,success', ":2: must be CSV: "),
    ("open.csv", f'{HEADER}\n"a,1,{START_MS},1,success', ":2: must be CSV: unexpected end of data"),
    (
        "b.csv",
        f"{HEADER}\n,1,{START_MS},1,success",
        ":2: column taskId must be a string or an integer",
    ),
    ("d.csv", f"{HEADER}\na,1,{START_MS},-1,success", ":2: column durationMs must be from 0 to"),
    (
        "n.csv",
        f"{HEADER}\na,1,{START_MS},NaN,success",
        ":2: column durationMs must be a number, got 'NaN'",
    ),
    ("i.csv", f"{HEADER}\na,1,{START_MS},1e999,success", ":2: column durationMs must be finite"),
    (
        "_.csv",
        f"{HEADER}\na,1,{START_MS},1_0,success",
        ":2: column durationMs must be a number, got '1_0'",
    ),
    (
        "e.csv",
        f"{HEADER}\n{ROW}\na,1,{START_MS},,success",
        ":3: column durationMs must be a number, got no",
    ),
    (
        "0.csv",
        f"{HEADER}\na,0,{START_MS},1,success",
        ":2: column attemptNumber must be from 1 to 1,000,000",
    ),
    (
        "1.csv",
        f"{HEADER}\na,1.5,{START_MS},1,success",
        ":2: column attemptNumber must be a whole number",
    ),
    (
        "x.csv",
        f"{HEADER}\na,1,2027-01-15,1,success",
        ":2: column startedAt must be a number, got '2027",
    ),
    (
        "sec.csv",
        f"{HEADER}\na,1,{EPOCH},1,success",
        ":2: column startedAt must be epoch milliseconds",
    ),
    (
        "k.csv",
        f"{HEADER}\na,1,{START_MS},1,missing",
        ":2: column outcome must be one of success, transient",
    ),
    ("utf.csv", HEADER.encode() + b"\n\xff\n", ":2: must be UTF-8, got the byte 0xff"),
    (
        "long.csv",
        HEADER + "\n" + "a" * (MAX_LINE_BYTES + 1),
        ":2: a line must have at most 1,000,000 bytes",
    ),
    ("wide.csv", HEADER + "\n" + "a" * 200_000, ":2: must be CSV: field larger than field limit"),
    ("c.jsonl", f"{OBJECT}\n{OBJECT[:40]}", ':2: must be a JSON object, got \'{"taskId"'),
    ("l.json", f"[{OBJECT}]\n", ":1: must be a JSON object, got [{"),
    ("deep.jsonl", "[" * 500_000, ":1: must be a JSON object, got '[[["),
    ("g.jsonl", f"{OBJECT}\n\nhello\n", ":3: must be a JSON object, got 'hello'"),
    (
        "u.jsonl",
        OBJECT.replace("durationMs", "took"),
        ":1: column durationMs is missing; there are",
    ),
    (
        "w.jsonl",
        OBJECT.replace("12.5", '"12.5"'),
        ":1: column durationMs must be a number, got '12.5'",
    ),
    ("y.jsonl", OBJECT.replace("12.5", "true"), ":1: column durationMs must be a number, got True"),
    ("z.jsonl", OBJECT.replace("12.5", "NaN"), ":1: column durationMs must be finite, got nan"),
    ("big.jsonl", OBJECT.replace("12.5", "9" * 5_000), ":1: must be a JSON object, got"),
    (
        "null.jsonl",
        OBJECT.replace('"a"', "null"),
        ":1: column taskId must be a string or an integer",
    ),
    ("f.jsonl", OBJECT.replace('"success"', "7"), ":1: column outcome must be one of"),
]


@pytest.mark.parametrize(
    ("name", "text", "message"), INVALID_LOGS, ids=[case[0] + case[2] for case in INVALID_LOGS]
)
def test_invalid_log_is_rejected(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    """The error starts with the file and the line, and names the rule and the value."""
    with pytest.raises(ConfigurationError) as caught:
        read_text(tmp_path, text, name)

    assert str(caught.value).startswith(f"{tmp_path / name}{message}")


def test_error_mentions_an_incomplete_last_line(tmp_path: Path) -> None:
    """The error for an incomplete last line asks whether the file is cut off."""
    with pytest.raises(ConfigurationError, match=r"is the end of the file cut off\?$"):
        read_text(tmp_path, f"{OBJECT}\n{OBJECT[:40]}", "log.jsonl")


def test_unreadable_file_is_rejected(tmp_path: Path) -> None:
    """The error names a missing file or a folder."""
    with pytest.raises(ConfigurationError, match=r"no\.csv: there is no such file"):
        read_attempt_log(tmp_path / "no.csv")
    with pytest.raises(ConfigurationError, match="cannot be read: "):
        read_attempt_log(str(tmp_path))


def test_number_of_attempts_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log with too many attempts is rejected."""
    monkeypatch.setattr(module, "MAX_ATTEMPTS", 2)

    assert 2 == len(read_text(tmp_path, f"{HEADER}\n{ROW}\n{ROW}\n"))
    with pytest.raises(ConfigurationError, match=r"log.csv:4: more than 2 attempts"):
        read_text(tmp_path, f"{HEADER}\n{ROW}\n{ROW}\n{ROW}\n")
