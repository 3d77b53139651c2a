"""Examples of the JSON of requests and responses, for the OpenAPI document."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from tarry.service.api.monitoring import HealthStatus
from tarry.service.api.overview import Overview
from tarry.service.api.policies import NewPolicy, PolicyFields
from tarry.wire import tasks as wire
from tarry.wire.policies import SERVICE_PRESETS, policy_to_json

_TASK_ID = "01a1dee8-4da6-777c-bd58-a99cd6e4fecb"
_CREATED_AT = 1_794_741_128_614
_LANE = "https:api.example.com:443"
_TARGET_URL = "https://api.example.com/orders"
_SECRET = f"whsec_{b64encode(b'an example, not a secret').decode()}"
_REQUEST = {
    "targetUrl": _TARGET_URL,
    "body": {"order": 7},
    "idempotencyKey": "order-7",
    "policy": {"maxAttempts": 10, "totalBudgetMs": 3_600_000},
    "callbackUrl": "https://shop.example.com/callbacks",
}
_TASK = {
    "taskId": _TASK_ID,
    "status": "PENDING",
    "reason": None,
    "idempotencyKey": "order-7",
    "targetUrl": _TARGET_URL,
    "method": "POST",
    "headers": {"Content-Type": "application/json"},
    "policyId": "default",
    "policyVersion": None,
    "policy": {"maxAttempts": 10, "totalBudgetMs": 3_600_000},
    "lane": _LANE,
    "attemptNumber": 1,
    "nextAttemptAt": _CREATED_AT + 1_413,
    "createdAt": _CREATED_AT,
    "finishedAt": None,
    "bodySize": 11,
    "bodyRef": None,
    "callbackUrl": "https://shop.example.com/callbacks",
    "callbackPolicyId": None,
    "cancelling": False,
    "replays": 0,
    "version": 2,
    "lastStatus": 503,
    "lastError": None,
    "lastAttemptAt": _CREATED_AT + 2,
    "response": None,
}
_ATTEMPT = {
    "taskId": _TASK_ID,
    "attemptNumber": 1,
    "scheduledAt": _CREATED_AT,
    "startedAt": _CREATED_AT + 2,
    "durationMs": 41.5,
    "dnsMs": 3.1,
    "connectMs": 11.2,
    "tlsMs": 18.4,
    "firstByteMs": 8.6,
    "remoteAddress": "192.0.2.10:443",
    "responseStatus": 503,
    "errorMessage": None,
    "errorClass": None,
    "outcome": "transient",
    "decision": {
        "action": "wait",
        "reason": None,
        "delayMs": 1_369.0,
        "ceilingMs": 2_000.0,
        "jitter": "full",
        "hintMs": None,
        "hintSource": None,
        "policyVersion": None,
        "budget": 9.0,
        "breaker": "closed",
    },
    "responseExcerpt": "Service Unavailable",
    "worker": "host-71-5f0e2a9c",
    "responseTruncated": False,
}
_NEW_POLICY = {"policyId": "nightly", "initialDelayMs": 60_000, "totalBudgetMs": 28_800_000}
_FILTER = {"lane": _LANE, "reason": "attempts"}
_POLICY = {
    **policy_to_json(SERVICE_PRESETS["default"]),
    "policyId": "default",
    "version": None,
    "createdAt": None,
}
_REPLAY = {
    "replayId": "01a1dee9-0c5e-7a34-9f0b-3f0c6b1d2e4a",
    "status": "RUNNING",
    "filter": {**_FILTER, "before": _CREATED_AT},
    "rate": 10.0,
    "matched": 240,
    "replayed": 30,
    "createdAt": _CREATED_AT,
    "finishedAt": None,
    "finished": {"SUCCEEDED": 28, "EXHAUSTED": 1},
}
_SIGNING_SECRET = {
    "secretId": "01a1deea-5b1c-7d02-8c55-0e6f4a7b9d13",
    "lane": _LANE,
    "type": "HMAC",
    "createdAt": _CREATED_AT,
    "expiresAt": None,
}
_LIMITS = {"ratePerSecond": 50, "concurrency": 10, "breaker": {"openForMs": 60_000}}
_LISTED_DOWNSTREAM = {
    "tenant": "acme",
    "lane": _LANE,
    "state": "ACTIVE",
    "parkedUntil": None,
    "consecutiveOpens": 0,
    "pending": 12,
    "inFlight": 3,
    "dead": 1,
    "lastClaimAt": _CREATED_AT,
    "local": {
        "breaker": "closed",
        "budget": 9.5,
        "running": 3,
        "leased": 5,
        "p50Ms": 38.0,
        "p95Ms": 112.0,
        "waitReason": None,
        "ratePerSecond": 50.0,
        "concurrencyLimit": 10,
    },
    "limits": _LIMITS,
    "waitingFor": None,
    "limitsSource": "API",
    "breaker": "closed",
    "breakerChangedAt": _CREATED_AT,
    "breakerHistory": None,
    "latency": {
        "since": _CREATED_AT,
        "attempts": 5_120,
        "p50Ms": 38.1,
        "p90Ms": 90.4,
        "p99Ms": 240.2,
    },
}
_DOWNSTREAM = _LISTED_DOWNSTREAM | {
    "breakerHistory": [
        {"at": _CREATED_AT, "from": "half-open", "to": "closed", "reason": "A probe succeeded."}
    ]
}
_WORKER = {
    "name": "node-1-4711-9f8e7d6c",
    "host": "node-1",
    "pid": 4711,
    "role": "worker",
    "version": "1.0.0",
    "startedAt": _CREATED_AT,
    "seenAt": _CREATED_AT + 3_600_000,
    "runningAttempts": 3,
    "leasedTasks": 17,
}
_EXPLANATION = {
    "taskId": _TASK_ID,
    "status": "PENDING",
    "reason": None,
    "text": "PENDING after 1 attempt.",
    "steps": [
        {
            "attemptNumber": 1,
            "text": "Attempt 1 got the status 503. Another attempt follows.",
            "attempt": _ATTEMPT,
        }
    ],
    "next": {"text": "Attempt 2 of 10 is due in 1.4 s.", "at": _CREATED_AT + 1_413},
    "requestExcerpt": '{"order":7}',
    "requestTruncated": False,
}
_SCHEDULE = {
    "retries": [
        {
            "retryNumber": 1,
            "ceilingMs": 1_000.0,
            "shortestDelayMs": 0.0,
            "longestDelayMs": 1_000.0,
        }
    ],
    "maxRetries": 9,
    "averageRetries": 9,
    "longestWaitMs": 511_000.0,
}
_SIMULATED_RUN = {
    "requestsPerSecond": [33.0, 31.0],
    "calls": 3_656,
    "requests": 6_119,
    "requestsPerCall": 1.67,
    "peakLoad": 7.86,
    "crashes": 2,
    "successRate": 0.999,
    "unfinishedCalls": 2,
    "recoveredAfterMs": 24_000.0,
}
_SIMULATION = {
    "description": "A dependency freezes for 20 s, restarts and drops every connection. Do its "
    "clients let it recover?",
    "clients": 1_000,
    "stepMs": 1_000.0,
    "outageStartMs": 20_000.0,
    "outageEndMs": 40_000.0,
    "withPolicy": _SIMULATED_RUN,
    "withoutRetries": {**_SIMULATED_RUN, "requests": 3_865, "requestsPerCall": 1.0},
}
_ADVICE = {
    "lane": _LANE,
    "policyId": "default",
    "attempts": 12_480,
    "calls": 11_902,
    "outages": 1,
    "spanMs": 86_395_000.0,
    "suggestions": [
        {
            "field": "initialDelayMs",
            "current": 1_000,
            "proposed": 98,
            "reason": "twice the median: the first wait averages one round trip",
            "basis": "median 49 ms of 11,740",
            "hasEnoughData": True,
        },
        {
            "field": "maxDelayMs",
            "current": 60_000,
            "proposed": 60_000,
            "reason": "too little data: 1 outage, 3 needed for a median; kept at 60 s",
            "basis": "",
            "hasEnoughData": False,
        },
    ],
    "warnings": [],
    "simulation": "Simulated with the durations of these attempts. No metric changes by much.",
}
_OVERVIEW = {
    "scope": "all",
    "range": "1h",
    "from": 1_794_737_520_000,
    "to": _CREATED_AT,
    "stepMs": 10_000,
    "points": [
        {
            "at": 1_794_741_120_000,
            "attempts": {"success": 412, "transient": 31},
            "succeededFirst": 390,
            "succeededRetried": 22,
            "exhausted": 1,
            "cancelled": 0,
            "lagP50Ms": 0.6,
            "lagP99Ms": 4.2,
            "pending": 57.0,
            "inFlight": 12.0,
            "deadLetters": 3.0,
            "oldestDueAgeMs": 0.0,
        }
    ],
    "lagP50Ms": 0.6,
    "lagP99Ms": 4.2,
    "delays": [{"upToMs": 500, "count": 14}, {"upToMs": 700, "count": 17}],
    "current": {"pending": 60, "inFlight": 9, "deadLetters": 3, "oldestDueAgeMs": 0},
}
_DEAD_LETTER_GROUP = {
    "reason": "attempts",
    "lane": _LANE,
    "count": 240,
    "newestTaskId": _TASK_ID,
    "newestFinishedAt": _CREATED_AT + 90_000,
    "newestStatus": 503,
    "newestError": None,
}
_CALLBACK = {
    "taskId": _TASK_ID,
    "idempotencyKey": "order-7",
    "targetUrl": _TARGET_URL,
    "status": "SUCCEEDED",
    "reason": None,
    "attemptNumber": 2,
    "responseStatus": 200,
    "createdAt": _CREATED_AT,
}


def _page(item: dict[str, Any], next_cursor: str | None = None) -> dict[str, Any]:
    return {"items": [item], "nextCursor": next_cursor}


EXAMPLES: dict[str, Any] = {
    str(json_type): example
    for json_type, example in (
        (wire.RetryTaskRequest, _REQUEST),
        (wire.BatchRequest, {"tasks": [_REQUEST]}),
        (wire.BulkCancelRequest, {"filter": {"urlPrefix": _TARGET_URL}, "dryRun": True}),
        (wire.ReplayRequest, {"filter": _FILTER, "rate": 10}),
        (NewPolicy, _NEW_POLICY),
        (PolicyFields, {"initialDelayMs": 60_000, "totalBudgetMs": 28_800_000}),
        (wire.RetryTask, _TASK),
        (wire.BatchResults, {"results": [{"status": 201, "task": _TASK}]}),
        (wire.Page[wire.RetryTask], _page(_TASK, "34")),
        (wire.Page[wire.AttemptLog], _page(_ATTEMPT)),
        (wire.Explanation, _EXPLANATION),
        (wire.RetryPolicy, _POLICY),
        (wire.Page[wire.RetryPolicy], _page(_POLICY)),
        (wire.PolicySchedule, _SCHEDULE),
        (wire.PolicySimulation, _SIMULATION),
        (wire.PolicyAdviceRequest, {"lane": _LANE, "policyId": "default"}),
        (wire.PolicyAdvice, _ADVICE),
        (wire.ReplayJob, _REPLAY),
        (wire.Page[wire.ReplayJob], _page(_REPLAY)),
        (wire.Page[wire.DeadLetterGroup], _page(_DEAD_LETTER_GROUP)),
        (wire.PurgeResult, {"purged": 240, "more": False, "nextCursor": None}),
        (
            wire.BulkCancelResult,
            {"matched": 240, "cancelled": 239, "running": 1, "nextCursor": None},
        ),
        (wire.DownstreamLimitsRequest, _LIMITS),
        (wire.DownstreamInfo, _DOWNSTREAM),
        (wire.Page[wire.DownstreamInfo], _page(_LISTED_DOWNSTREAM)),
        (wire.Page[wire.WorkerInfo], _page(_WORKER)),
        (wire.SigningSecretRequest, {"lane": _LANE, "expirePreviousMs": 3_600_000}),
        (wire.SigningSecret, {**_SIGNING_SECRET, "secret": _SECRET}),
        (wire.Page[wire.SigningSecret], _page(_SIGNING_SECRET)),
        (wire.CallbackBody, _CALLBACK),
        (wire.Caller, {"tenant": "shop", "role": "write"}),
        (Overview, _OVERVIEW),
        (HealthStatus, {"status": "ok"}),
    )
}
"""Examples by the text of their type, as `build_openapi` uses it."""
