"""The report of a study as an HTML page or as an image."""

from tarry.simulator.report.images import write_png, write_svg
from tarry.simulator.report.page import write_html

__all__ = ["write_html", "write_png", "write_svg"]
