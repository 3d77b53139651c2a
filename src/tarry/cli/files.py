"""Reads and writes the files of the commands. Error messages name the option or the file."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarry.core.policy import PRESETS
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.simulator.documents import check_writable, import_yaml, parse_file, write_atomically
from tarry.simulator.files import read_defence

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence


def check_output_path(path: Path, suffixes: Sequence[str] = (), option: str = "--out") -> None:
    """Raise `ConfigurationError` if a file cannot be written or its suffix is not allowed.

    Commands call this before they start a long computation. Empty `suffixes` allow all suffixes.
    """
    if suffixes and path.suffix.lower() not in suffixes:
        rule = f"must be a file name that ends in {' or '.join(suffixes)}"
        raise ConfigurationError(option, rule, str(path))
    with _prefix_errors(option):
        check_writable(path)


def write_text(path: Path, text: str, option: str = "--out") -> None:
    """Write a file atomically; error messages name the option and the path."""
    with _prefix_errors(option):
        write_atomically(path, text.encode())


def read_documents(path: Path) -> list[Any]:
    """Return the documents of a JSON or YAML file; a YAML file may contain several."""
    documents = [parsed.data for parsed in parse_file(path) if parsed.data is not None]
    if not documents:
        msg = f"{path}: the file is empty"
        raise ConfigurationError(msg)
    return documents


def read_policy(path_or_preset: str) -> Defence:
    """Return the policy in a file, or the preset with this name if there is no such file.

    A `Defence` is a policy together with its breaker, budget, limiter and hedging.
    """
    path = Path(path_or_preset)
    if not path.suffix and not path.exists():
        if path_or_preset in PRESETS:
            return Defence(PRESETS[path_or_preset])
        presets = ", ".join(PRESETS)
        msg = f"{path_or_preset!r} is neither a file nor a preset; the presets are {presets}"
        raise ConfigurationError(msg)
    return read_defence(path)


def yaml_text(documents: Iterable[dict[str, Any]]) -> str:
    """Return documents as YAML; keys keep their order."""
    yaml = import_yaml()
    return str(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=1000))


@contextmanager
def _prefix_errors(option: str) -> Generator[None]:
    """Prefix the message of a `ConfigurationError` with the name of the option."""
    try:
        yield
    except ConfigurationError as error:
        msg = f"{option}: {error}"
        raise ConfigurationError(msg) from None
