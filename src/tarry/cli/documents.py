"""Read and write the documents of other systems: JSON, or YAML with several in one file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError, MissingExtra
from tarry.simulator.documents import LARGEST, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def read_documents(path: Path) -> list[Any]:
    """Return what a file holds, one value for each document in it; JSON is taken for YAML, too."""
    text = read_text(path, LARGEST)
    try:
        found = [json.loads(text)] if path.suffix.lower() == ".json" else _from_yaml(path, text)
    except json.JSONDecodeError as error:
        msg = f"{path}:{error.lineno}: not JSON: {error.msg}"
        raise ConfigurationError(msg) from None
    except RecursionError:
        msg = f"{path}: nested too deeply"
        raise ConfigurationError(msg) from None
    documents = [document for document in found if document is not None]
    if not documents:
        msg = f"{path}: there is no document in it"
        raise ConfigurationError(msg)
    return documents


def yaml_text(documents: Iterable[dict[str, Any]]) -> str:
    """Return documents as YAML, in the order of their keys."""
    return str(_yaml().safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=1000))


def _from_yaml(path: Path, text: str) -> list[Any]:
    yaml = _yaml()
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):  # a few of them can stand for gigabytes
                line = event.start_mark.line + 1
                msg = f"{path}:{line}: write the value out instead of an alias"
                raise ConfigurationError(msg)
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        msg = f"{where}: not YAML: {problem}"
        raise ConfigurationError(msg) from None


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtra("YAML needs PyYAML: pip install 'tarry[sim]'") from None
    return yaml
