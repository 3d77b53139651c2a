"""Figures and their limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """A figure with its lower and upper limit; without a figure, the limit is not met."""

    name: str
    figure: float | None
    minimum: float | None = None
    maximum: float | None = None

    @property
    def met(self) -> bool:
        if self.figure is None:
            return False
        if self.minimum is not None and self.figure < self.minimum:
            return False
        return self.maximum is None or self.figure <= self.maximum

    def __str__(self) -> str:
        figure = "?" if self.figure is None else f"{self.figure:.2f}"
        bounds = [f">= {self.minimum:g}"] if self.minimum is not None else []
        bounds += [f"<= {self.maximum:g}"] if self.maximum is not None else []
        return f"{'pass' if self.met else 'MISS'}: {self.name} {figure} {' and '.join(bounds)}"


def quantile(figures: list[float], share: float) -> float:
    """Return a quantile: the figure that `share` of the figures do not exceed; NaN if empty."""
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
