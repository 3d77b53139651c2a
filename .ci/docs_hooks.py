"""Hooks of mkdocs: fences with words that only the tests use, and files outside of docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_FENCE = re.compile(r"^```python (?:notest|before|after)$", re.MULTILINE)
_FILE_LINK = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to, such as `../examples/client.py`."""
    root = Path(config.docs_dir).parent
    pages = [page.content_string for page in files.documentation_pages()]
    linked_paths = {path for text in pages for path in _FILE_LINK.findall(text)}
    for path in sorted(linked_paths):
        if (root / path).is_file():  # else mkdocs reports the link
            files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with fences and links that mkdocs understands."""
    return _FILE_LINK.sub(r"](\1", _FENCE.sub("```python", markdown))
