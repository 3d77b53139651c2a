"""Files that the commands read and write; errors name the option or the file."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarry.core.policy import PRESETS
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.simulator.files import read_defence
from tarry.simulator.files.documents import import_yaml, parse_file
from tarry.simulator.files.file_io import check_writable, write_atomically

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence


def check_output_path(path: Path, formats: Sequence[str] = (), option: str = "--out") -> None:
    """Raise an error for a file that cannot be written, before the work for it is done."""
    if formats and path.suffix.lower() not in formats:
        rule = f"must be a file name that ends in {' or '.join(formats)}"
        raise ConfigurationError(option, rule, str(path))
    with _errors_named_after(option):
        check_writable(path)


def write_text(path: Path, text: str, option: str = "--out") -> None:
    """Write a file atomically; an error names the option and the path."""
    with _errors_named_after(option):
        write_atomically(path, text.encode())


def read_documents(path: Path) -> list[Any]:
    """Return the documents of a JSON or YAML file."""
    documents = [parsed.data for parsed in parse_file(path) if parsed.data is not None]
    if not documents:
        msg = f"{path}: the file is empty"
        raise ConfigurationError(msg)
    return documents


def read_policy(name: str) -> Defence:
    """Return the policy in a file, or the preset with that name if there is no such file."""
    path = Path(name)
    if not path.suffix and not path.exists():
        if name in PRESETS:
            return Defence(PRESETS[name])
        msg = f"{name!r} is neither a file nor a preset; the presets are {', '.join(PRESETS)}"
        raise ConfigurationError(msg)
    return read_defence(path)


def yaml_text(documents: Iterable[dict[str, Any]]) -> str:
    """Return documents as YAML; keys keep their order."""
    yaml = import_yaml()
    return str(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=1000))


@contextmanager
def _errors_named_after(option: str) -> Generator[None]:
    try:
        yield
    except ConfigurationError as error:
        msg = f"{option}: {error}"
        raise ConfigurationError(msg) from None
