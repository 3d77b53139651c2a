from __future__ import annotations

import pytest

from tarry.service.api.trace_context import clean_tracestate
from tests.service.api.harness import TARGET, ApiHarness

TRACE = f"00-{'1' * 32}-{'2' * 16}-01"
LONG_MEMBER = f"long={'v' * 200}"
SHORT_MEMBERS = [f"k{i}={'v' * 90}" for i in range(6)]


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("vendor=a,other=b", "vendor=a,other=b"),
        (" vendor=a ,\t, 1tenant@system=b c ", "vendor=a,1tenant@system=b c"),
        ("", None),
        (" , ", None),
        ("vendor", None),
        ("vendor=", None),
        ("Vendor=a", None),
        ("1vendor=a", None),
        ("vendor=a=b", None),
        ("vendor=\u00fc", None),
        ("vendor=a\r\nx: y", None),
        ("vendor=a,vendor=b", None),
        ("vendor=a,broken", None),
        (",".join(f"k{i}=v" for i in range(32)), ",".join(f"k{i}=v" for i in range(32))),
        (",".join(f"k{i}=v" for i in range(33)), None),
        (",".join([LONG_MEMBER, *SHORT_MEMBERS[:4]]), ",".join(SHORT_MEMBERS[:4])),
        (",".join(SHORT_MEMBERS), ",".join(SHORT_MEMBERS[:5])),
        (",".join(f"k{i}={'v' * 200}" for i in range(3)), None),
        ("x" * 10_000, None),
    ],
)
def test_clean_tracestate(text: str, cleaned: str | None) -> None:
    """An invalid `tracestate` is dropped; a long one loses long members, then the last members."""
    assert cleaned == clean_tracestate(text)


@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({}, {"traceparent": TRACE, "tracestate": "vendor=a"}, (TRACE, "vendor=a")),
        ({}, {"traceparent": TRACE, "tracestate": "Vendor=a"}, (TRACE, None)),
        ({}, {"traceparent": TRACE}, (TRACE, None)),
        ({}, {"traceparent": "00-xyz", "tracestate": "vendor=a"}, (None, None)),
        ({}, {"tracestate": "vendor=a"}, (None, None)),
        ({"traceparent": TRACE, "tracestate": " vendor=a"}, {}, (TRACE, "vendor=a")),
        ({"traceparent": TRACE}, {"traceparent": TRACE, "tracestate": "vendor=a"}, (TRACE, None)),
        ({"traceparent": TRACE, "tracestate": "?"}, {}, (TRACE, None)),
        ({"tracestate": "vendor=a"}, {}, (None, None)),
    ],
)
async def test_tracestate_is_stored_with_its_traceparent(
    api: ApiHarness,
    fields: dict[str, str],
    headers: dict[str, str],
    expected: tuple[str | None, str | None],
) -> None:
    """A task has the `tracestate` from the place of its `traceparent`, and none without it."""
    document = {"targetUrl": TARGET, **fields}
    response = await api.request("POST", "/retry-tasks", document, headers=headers)
    assert 201 == response.status
    _, content = await api.stored_task(response.json["taskId"])
    assert expected == (content.trace, content.tracestate)
