"""`load_policy`, which builds a policy and a downstream from a policy file."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.policyfile.defence import Defence, build_components
from tarry.runtime.downstream import Downstream
from tarry.wire.policies import to_file_fields

if TYPE_CHECKING:
    from tarry.core.policy import Policy


def load_policy(
    source: str | PathLike[str] | Mapping[str, Any], name: str
) -> tuple[Policy, Downstream]:
    """Return the policy of a policy file, and a new downstream with this name.

    The downstream has the breaker, the retry budget and the limiter of the file. All calls to the
    dependency must share it, so load a file once for each dependency.

    source: the path of a TOML or JSON file, or the content of a policy file as a dict.
    """
    if isinstance(source, Mapping):
        return _build(source, name)
    if not isinstance(source, (str, PathLike)):
        rule = "must be the path of a policy file, or its content as a dict"
        raise ConfigurationTypeError("source", rule, source)
    path = Path(source)
    try:
        return _build(_read(path), name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _build(data: Mapping[str, Any], name: str) -> tuple[Policy, Downstream]:
    defence = Defence.from_dict(to_file_fields(data))
    if defence.hedging is not None:
        raise ConfigurationError(
            "the file has the table [hedging] instead of a policy: pass its fields to "
            "tarry.Hedging(...) or tarry.hedge(...)"
        )
    return defence.policy, Downstream(name, **build_components(defence))


def _read(path: Path) -> Mapping[str, Any]:
    suffix = path.suffix.lower()
    if suffix not in {".toml", ".json"}:
        raise ConfigurationError(
            "the name of a policy file must end in .toml or .json; for other formats, pass "
            "the content as a dict"
        )
    try:
        text = path.read_text(encoding="utf-8")
        if suffix == ".toml":
            import tomllib

            return tomllib.loads(text)
        import json

        data = json.loads(text)
    except ValueError as error:  # the base class of the errors of both parsers and of the decoder
        raise ConfigurationError(str(error)) from error
    except RecursionError as error:
        raise ConfigurationError("the content is nested too deeply") from error
    if not isinstance(data, dict):
        raise ConfigurationTypeError("a policy file", "must contain an object", data)
    return cast("dict[str, Any]", data)
