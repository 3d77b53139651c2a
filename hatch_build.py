"""Build hook of hatchling: makes the long description of the package from README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)[^)]+\)")


class LongDescription(MetadataHookInterface):
    """Sets the long description to README.md, with the texts of relative links instead of links.

    A package index shows the description without the files that relative links lead to.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`."""
        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": _RELATIVE_LINK.sub(r"\1", text),
        }
