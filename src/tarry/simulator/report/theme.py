"""The light and dark colours of the report, for the page and for its charts."""

from __future__ import annotations

from typing import Any, NamedTuple

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
TEXT_SIZE = 12

# Variant n has the shape n % 7 and the colour n % 8. As 7 and 8 have no common factor, 56 variants
# differ in shape or colour.
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")


class Theme(NamedTuple):
    """The colours of a theme.

    On `page` and `surface`, text has a contrast ratio of at least 4.5, and marks of at least 3.
    """

    page: str
    """The background of the page."""
    surface: str
    """The background of tables and charts."""
    ink: str
    """Text."""
    muted: str
    """Text of less importance, such as captions and axis labels."""
    line: str
    """Borders, axes and grid lines."""
    context: str
    """The lines of the other variants in a time series of one variant."""
    accent: str
    """Highlights, such as the focus outline."""
    wash: str
    """The background of the lesson and of the selected variant."""
    span: str
    """The shading of a period behind a time series."""
    variants: tuple[str, ...]
    """The colours of the variants."""
    ramp: tuple[str, str]
    """The colours of the lowest and highest value of a heat map; `ink` is readable on both."""


LIGHT = Theme(
    page="#fbfaf7",
    surface="#ffffff",
    ink="#1c2028",
    muted="#5a6270",
    line="#e3e1da",
    context="#c2c6ce",
    accent="#2559b8",
    wash="#eef3fc",
    span="#f3efe4",
    variants=(
        "#c8431c",
        "#2a63c9",
        "#138560",
        "#8a4fc0",
        "#9c6f06",
        "#127b96",
        "#c03a7e",
        "#5b6472",
    ),
    ramp=("#f3f6fc", "#86ade9"),
)
DARK = Theme(
    page="#12151b",
    surface="#191d25",
    ink="#e8eaf0",
    muted="#a2aab8",
    line="#2c323d",
    context="#4d5666",
    accent="#8fb4ff",
    wash="#1c2739",
    span="#262b35",
    variants=(
        "#ff8f66",
        "#7aa7ff",
        "#4fcf9f",
        "#c89bff",
        "#e3b44a",
        "#55c7e3",
        "#ff8cc0",
        "#a9b2c1",
    ),
    ramp=("#1d2431", "#2b5cae"),
)


def css_properties() -> str:
    """Return CSS custom properties for the theme that the browser prefers, light or dark."""
    return (
        f":root{{color-scheme:light dark;{_properties(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{_properties(DARK)}}}}}"
        + "".join(f".v{n}{{--variant:var(--v{n})}}" for n in range(len(LIGHT.variants)))
    )


def _properties(theme: Theme) -> str:
    named = {name: getattr(theme, name) for name in ("page", "surface", "ink", "muted", "line")}
    named |= {"accent": theme.accent, "wash": theme.wash}
    named |= {f"v{n}": colour for n, colour in enumerate(theme.variants)}
    return "".join(f"--{name}:{value};" for name, value in named.items())


def vega_config(theme: Theme, *, legend: bool) -> dict[str, Any]:
    """Return the theme as a Vega-Lite configuration.

    `legend`: whether charts have a legend. On the page they have none, because the page has one.
    """
    text = {"labelColor": theme.muted, "titleColor": theme.muted, "titleFontWeight": "normal"}
    sizes = {"labelFontSize": TEXT_SIZE, "titleFontSize": TEXT_SIZE}
    return {
        "background": theme.surface,
        "font": FONT,
        "view": {"stroke": None},
        "title": {
            "color": theme.ink,
            "subtitleColor": theme.muted,
            "anchor": "start",
            "frame": "group",
        },
        "axis": {
            **text,
            **sizes,
            "gridColor": theme.line,
            "domainColor": theme.line,
            "tickColor": theme.line,
            "labelPadding": 6,
            "labelOverlap": True,
        },
        "legend": {
            **text,
            **sizes,
            "disable": not legend,
            "orient": "top",
            "offset": 30,
            "columns": 2,
            "symbolSize": 70,
            "labelLimit": 400,
        },
        "range": {
            "category": list(theme.variants),
            "symbol": list(SHAPES),
            "ramp": list(theme.ramp),
            "heatmap": list(theme.ramp),
        },
        "text": {"color": theme.ink, "fontSize": TEXT_SIZE},
        "style": {
            "context": {"color": theme.context, "strokeWidth": 1},
            "rule": {"color": theme.muted},
            "span": {"color": theme.span},
            "note": {"color": theme.muted},
            "hollow": {"fill": theme.surface},
            "cell": {"stroke": theme.surface, "strokeWidth": 2},
        },
    }
