"""Write the tables of the contention study into docs/contention.md.

`make tables` runs this module. tests/simulator/test_contention.py checks that the
page is current: the same seed gives the same text.
"""

from pathlib import Path
from statistics import fmean

from tarry.simulator import contention
from tarry.simulator.contention import CONTENTION_STUDY

PAGE = Path(__file__).parents[1] / "docs" / "contention.md"
CLIENT_COUNTS = (10, 20, 50, 100, 200)
BEGIN, END = "<!-- table: make tables -->\n", "<!-- end of table -->\n"
TRIALS, SEED = 10, 2015


def render_tables() -> str:
    """Return the tables of mean calls and milliseconds, by jitter and number of clients."""
    header = "".join(f" {clients} |" for clients in CLIENT_COUNTS)
    separator = "---|" + "---:|" * len(CLIENT_COUNTS)
    calls, times = [], []
    for jitter in CONTENTION_STUDY.variants:
        runs = [
            contention(jitter=jitter, clients=clients, trials=TRIALS, seed=SEED)
            for clients in CLIENT_COUNTS
        ]
        mean_calls = [fmean(trial.calls for trial in trials) for trials in runs]
        mean_times = [fmean(trial.time_ms for trial in trials) for trials in runs]
        calls.append(f"| `{jitter}` |" + "".join(f" {mean:,.0f} |" for mean in mean_calls))
        times.append(f"| `{jitter}` |" + "".join(f" {mean:,.0f} |" for mean in mean_times))
    lines = (
        f"| calls of N = |{header}",
        f"|{separator}",
        *calls,
        "",
        f"| ms for N = |{header}",
        f"|{separator}",
    )
    return "\n".join((*lines, *times)) + "\n"


def tables_on_page(page: str) -> str:
    """Return the tables that are on the page."""
    return page.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(
        f"{before}{BEGIN}{render_tables()}{END}{rest.partition(END)[2]}", encoding="utf-8"
    )
