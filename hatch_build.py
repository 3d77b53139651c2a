"""Build hook of hatchling: makes the long description of the package and its links."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

if TYPE_CHECKING:
    from re import Match

_RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


class PackageLinks(MetadataHookInterface):
    """Sets the long description to README.md, and the links that a package index shows.

    `PROJECT_URL` is the address of the repository on its host, such as
    https://github.com/OWNER/tarry. The release workflow sets it. With it, relative links lead to
    the files of this version there. Without it, the package has no project URLs, and relative links
    are replaced by their texts, because a package index does not have the files.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the fields `readme` and `urls`."""
        url, version = os.environ.get("PROJECT_URL", "").rstrip("/"), metadata["version"]
        if url and not url.startswith("https://"):
            msg = f"PROJECT_URL must be an address that begins with https://, got {url!r}"
            raise ValueError(msg)
        files = f"{url}/blob/v{version}" if url else None

        def replace_link(link: Match[str]) -> str:
            return link[1] if files is None else f"[{link[1]}]({files}/{link[2]})"

        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": _RELATIVE_LINK.sub(replace_link, text),
        }
        metadata["urls"] = {}
        if url:
            metadata["urls"] = {
                "Repository": url,
                "Documentation": f"{files}/docs/index.md",
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
