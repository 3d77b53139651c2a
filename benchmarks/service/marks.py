"""Figures and their limits (marks)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """A figure with its lower and upper limit; a mark without a figure is missed."""

    what: str
    figure: float | None
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        if self.figure is None:
            return False
        low = self.least is None or self.figure >= self.least
        return low and (self.most is None or self.figure <= self.most)

    def __str__(self) -> str:
        figure = "?" if self.figure is None else f"{self.figure:.2f}"
        bounds = [f">= {self.least:g}"] if self.least is not None else []
        bounds += [f"<= {self.most:g}"] if self.most is not None else []
        return f"{'pass' if self.met else 'MISS'}: {self.what} {figure} {' and '.join(bounds)}"


def quantile(figures: list[float], share: float) -> float:
    """Return a quantile: the figure that `share` of the figures do not exceed; NaN if empty."""
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
