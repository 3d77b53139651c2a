from __future__ import annotations

from tarry.simulator.report.vega import axis_range, log_ticks, x_channel


def test_log_axis_has_few_ticks() -> None:
    """A log axis has ticks at powers of ten, and between them if there are few."""
    wide = log_ticks(axis_range([1.0, 1e5], log=True))
    narrow = log_ticks(axis_range([1.0, 30.0], log=True))
    assert ([1.0, 10.0, 100.0, 1e3, 1e4, 1e5], [1.0, 2.0, 5.0, 10.0, 20.0]) == (wide, narrow)


def test_swept_decades_get_a_log_axis() -> None:
    """An axis of values over several decades is logarithmic."""
    kinds = [
        x_channel(values, "x", "", swept=True)["scale"]["type"]
        for values in ([1, 10, 100], [1, 2, 3])
    ]
    assert ["log", "linear"] == kinds
