"""Tests of the package: cheap imports, `__all__` and the public API file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import tarry
from tests import public_api

PUBLIC_API = Path(__file__).parents[1] / "docs" / "public-api.txt"


def modules_loaded_by(code: str) -> set[str]:
    """Return the names of the modules that a new interpreter imports for this code."""
    program = f"""
import json, sys
before = set(sys.modules)
{code}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True
    )
    return set(json.loads(done.stdout))


def third_party_modules(modules: set[str]) -> set[str]:
    """Return the modules that are neither of the standard library nor of tarry."""
    return {
        module
        for module in modules
        if module.partition(".")[0] not in {*sys.stdlib_module_names, "tarry"}
    }


@pytest.mark.parametrize("code", ["import tarry", "import tarry; tarry.retry"])
def test_import_loads_no_third_party_module_and_no_asyncio(code: str) -> None:
    loaded = modules_loaded_by(code)

    assert "tarry" in loaded
    assert set() == third_party_modules(loaded)
    assert "asyncio" not in loaded


def test_a_failed_call_does_not_load_dataclasses() -> None:
    """The first failed call of a program loads events and the log, but not `dataclasses`."""
    loaded = modules_loaded_by("""
import tarry
try:
    tarry.call(lambda: 1 / 0, on=ZeroDivisionError, attempts=2)
except ZeroDivisionError:
    pass
""")

    assert {"tarry.core.events", "tarry.telemetry.logs"} <= loaded
    assert "dataclasses" not in loaded


def test_no_public_name_loads_third_party_modules() -> None:
    """Every public name resolves with the standard library alone."""
    loaded = modules_loaded_by("import tarry\nfor name in tarry.__all__: getattr(tarry, name)")

    assert set() == third_party_modules(loaded)


def test_all_is_sorted() -> None:
    """`__all__` is sorted and has no duplicates."""
    assert sorted(set(tarry.__all__)) == tarry.__all__


@pytest.mark.parametrize("name", tarry.__all__)
def test_public_name_resolves(name: str) -> None:
    """Each name in `__all__` is an attribute of the package."""
    assert hasattr(tarry, name)


def test_public_types_can_be_combined_when_a_program_runs() -> None:
    """The types can be used in annotations that are evaluated, such as `tarry.On | None`."""
    aliases = (tarry.On, tarry.AsyncOn, tarry.OnRetry, tarry.Seconds, tarry.Listener)
    for public_type in (*aliases, tarry.Attempts, tarry.Decorator):
        assert type(None) in get_args(public_type | None)


def test_dir_has_every_public_name() -> None:
    """`dir(tarry)` has every public name, also names that are not loaded yet."""
    assert set() == set(tarry.__all__) - set(dir(tarry))


@pytest.mark.parametrize("package", public_api.PUBLIC_MODULES[1:])
def test_public_package_needs_no_import_of_its_own(package: str) -> None:
    """`import tarry` is enough for `tarry.testing`, and does not load it before it is used."""
    assert package not in modules_loaded_by("import tarry")
    assert package in modules_loaded_by(f"import tarry; {package}")


def test_unknown_name_is_an_attribute_error() -> None:
    """An unknown name raises AttributeError with the name."""
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(tarry, "no_such_name")  # noqa: B009 - a plain access would not pass the type checker


def test_public_api_file_is_current() -> None:
    """docs/public-api.txt has the public API of the current source."""
    written = PUBLIC_API.read_text(encoding="utf-8")

    assert public_api.render() == written, "the public API changed: run `make api`, review the diff"
