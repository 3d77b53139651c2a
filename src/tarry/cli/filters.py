"""The options of commands that select tasks, such as --lane and --since."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from inspect import Parameter, signature
from typing import Annotated, Any, get_type_hints

import typer

from tarry.cli.options import parse_time
from tarry.core.checks import check_one_of
from tarry.wire.search import SEARCH_FIELDS

OPTION_BY_FIELD = {field.api_name: field.option for field in SEARCH_FIELDS.values()}
"""The options by the API's names of the filters."""
_PARAMETER = "filters"


class Filters:
    """The options of a command that select tasks, by the names of the fields of `Search`."""

    def __init__(self, texts: dict[str, str | None]) -> None:
        self._texts = {name: text for name, text in texts.items() if text is not None}

    @property
    def lane(self) -> str | None:
        """The option --lane."""
        return self._texts.get("lane")

    @property
    def policy(self) -> str | None:
        """The option --policy."""
        return self._texts.get("policy_id")

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments of the client's methods; empty without options.

        Raises ConfigurationError for an invalid option. A time such as 2h ago is computed once.
        """
        return {
            SEARCH_FIELDS[name].argument: _parse(name, text) for name, text in self._texts.items()
        }


def _parse(name: str, text: str) -> object:
    field = SEARCH_FIELDS[name]
    if field.is_time:
        return parse_time(field.option, text)
    if name != "status":
        return text
    from tarry.wire.tasks import STATUS_NAMES

    status = text.upper().replace("-", "_")
    check_one_of(field.option, status, STATUS_NAMES)
    return status


def takes_filters(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of a command that replaces its parameter `filters` by options.

    `names` are fields of `Search`, in the order of the help. typer reads the signature.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        types = get_type_hints(command, include_extras=True)
        parameters: list[Parameter] = []
        for parameter in signature(command).parameters.values():
            if parameter.name == _PARAMETER:
                parameters += map(_option, names)
            else:
                annotation = types[parameter.name]
                kind = Parameter.KEYWORD_ONLY
                parameters.append(parameter.replace(kind=kind, annotation=annotation))

        @wraps(command)
        def run(**arguments: Any) -> None:
            texts = {name: arguments.pop(name) for name in names}
            command(**arguments, filters=Filters(texts))

        vars(run)["__signature__"] = signature(command).replace(parameters=parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _option(name: str) -> Parameter:
    field = SEARCH_FIELDS[name]
    option = typer.Option(field.option, help=field.help, metavar=field.metavar)
    annotation = Annotated[str | None, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
