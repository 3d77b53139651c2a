"""The report of a study: a page with a story, a picture, and plain data."""

from tarry.simulator.report.images import write_png, write_svg
from tarry.simulator.report.page import write_html
from tarry.simulator.report.record import to_json

__all__ = ["to_json", "write_html", "write_png", "write_svg"]
