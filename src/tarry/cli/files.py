"""Read and write documents for the commands: their errors name the option or the file."""

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


def check_out(path: Path, formats: Sequence[str] = (), option: str = "--out") -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold."""
    if formats and path.suffix.lower() not in formats:
        msg = f"{option}: the name must end in {' or '.join(formats)}, got {str(path)!r}"
        raise ConfigurationError(msg)
    with _named(option):
        check_writable(path)


def write_text(path: Path, text: str, option: str = "--out") -> None:
    """Write a file whole or not at all; a refusal names the option and the path."""
    with _named(option):
        write_atomically(path, text.encode())


def read_documents(path: Path) -> list[Any]:
    """Return what a file of another system holds, one value for each document in it."""
    documents = [one.data for one in parse_file(path) if one.data is not None]
    if not documents:
        msg = f"{path}: there is no document in it"
        raise ConfigurationError(msg)
    return documents


def defence_of(name: str) -> Defence:
    """Read a policy file, or take the preset of that name where there is no such file."""
    path = Path(name)
    if not path.suffix and not path.exists():
        if name in PRESETS:
            return Defence(PRESETS[name])
        msg = f"no file and no preset {name!r}; the presets are {', '.join(PRESETS)}"
        raise ConfigurationError(msg)
    return read_defence(path)


def yaml_text(documents: Iterable[dict[str, Any]]) -> str:
    """Return documents as YAML, in the order of their keys."""
    yaml = import_yaml()
    return str(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=1000))


@contextmanager
def _named(option: str) -> Generator[None]:
    try:
        yield
    except ConfigurationError as error:
        msg = f"{option}: {error}"
        raise ConfigurationError(msg) from None
