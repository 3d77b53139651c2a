"""Write payments.csv: a log of 30,000 calls to a payment service that is down three times.

Run it: `python examples/payments_log.py`. `tarry tune` reads the log; your own log comes from
`tarry tasks export` or `tarry.telemetry.attempt_log`.
"""

from math import exp
from pathlib import Path
from random import Random

SUCCESS_RATES = (0.985, 0.9, 0.9, 0.001)  # of the attempts 1 to 4
OUTAGES = ((300, 325), (700, 742), (1100, 1160))  # seconds since the start
START_MS = 1_800_000_000_000

random = Random(7)
lines = ["taskId,attemptNumber,startedAt,durationMs,outcome"]
now = 0.0
for call in range(30_000):
    now += random.expovariate(20)
    at = now
    for attempt, success_rate in enumerate(SUCCESS_RATES, 1):
        duration = 0.05 * exp(0.8 * random.gauss())
        is_down = any(begin <= at < end for begin, end in OUTAGES)
        succeeds = random.random() < success_rate and not is_down
        outcome = "success" if succeeds else "transient"
        lines.append(
            f"task {call},{attempt},{START_MS + at * 1000:.3f},{duration * 1000:.6f},{outcome}"
        )
        if succeeds:
            break
        at += duration + 0.2 * random.random()
Path("payments.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")
print(f"payments.csv: {len(lines) - 1:,} attempts of 30,000 calls")
