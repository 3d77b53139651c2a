"""Hooks of mkdocs: words of fences that only the tests use, linked files, and copy buttons."""

import re
import shlex
from html import escape, unescape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_FENCE = re.compile(r"^```python (?:notest|before|after)$", re.MULTILINE)
_CODE_BLOCK = re.compile(r'<div class="highlight">(.*?)</div>', re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_PROMPT = "$ "
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


def on_page_content(html: str, **_: Any) -> str:
    """Return a page whose copy buttons copy commands, without prompts and output."""
    return _CODE_BLOCK.sub(_add_commands, html)


def _add_commands(block: re.Match[str]) -> str:
    commands = _find_commands(unescape(_TAG.sub("", block[1])))
    if not commands:
        return block[0]
    # The theme copies the value of `data-copy` instead of the text of the block.
    return block[0].replace("<div ", f'<div data-copy="{escape(commands)}" ', 1)


def _find_commands(text: str) -> str:
    """Return the lines after a prompt, and those that continue them."""
    commands: list[str] = []
    for line in text.splitlines():
        if line.startswith(_PROMPT):
            commands.append(line.removeprefix(_PROMPT))
        elif commands and not _is_complete(commands[-1]):
            commands[-1] += f"\n{line}"
    return "\n".join(commands)


def _is_complete(command: str) -> bool:
    """Return whether no quote is open, and the last line does not end with a backslash."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True
