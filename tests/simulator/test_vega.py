from __future__ import annotations

import pytest

from tarry.simulator.vega import DARK, LIGHT, Theme, axis_range, log_ticks, x_channel


def test_log_axis_has_few_ticks() -> None:
    """A log axis has ticks at powers of ten, and at 2 and 5 times them if there are few."""
    wide = log_ticks(axis_range([1.0, 1e5], is_log=True))
    narrow = log_ticks(axis_range([1.0, 30.0], is_log=True))
    assert ([1.0, 10.0, 100.0, 1e3, 1e4, 1e5], [1.0, 2.0, 5.0, 10.0, 20.0]) == (wide, narrow)


def test_swept_decades_get_a_log_axis() -> None:
    """An axis of values over several decades is logarithmic."""
    scale_types = [
        x_channel(values, "x", "", is_swept=True)["scale"]["type"]
        for values in ([1, 10, 100], [1, 2, 3])
    ]
    assert ["log", "linear"] == scale_types


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_enough_contrast(theme: Theme) -> None:
    """Text has a contrast of at least 4.5, and chart marks of at least 3, on each background."""
    for background in (theme.page, theme.surface, theme.wash, theme.span, *theme.ramp):
        assert 4.5 <= contrast(theme.ink, background)
    for background in (theme.page, theme.surface, theme.wash):
        assert 4.5 <= min(contrast(theme.muted, background), contrast(theme.accent, background))
    for background in (theme.page, theme.surface, theme.wash, theme.span):
        assert 3 <= min(contrast(colour, background) for colour in theme.marks)


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of WCAG 2, section 1.4.3."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
