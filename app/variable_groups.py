"""Read settings that are dataclasses: each field has its own environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_origin, get_type_hints

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from spard.config.run_spec import parse
from spard.errors import InvalidRecipe

PREFIX = "SPARD_"


@dataclass(frozen=True, slots=True)
class Group:
    """Variables that together form one dataclass, one per field and named after it."""

    kind: type
    named: str | None = "name"  # the field whose variable has the group's own name

    def variable(self, group: str, field: str) -> str:
        """Return the name of the variable that sets a field."""
        return (f"{PREFIX}{group}" + ("" if field == self.named else f"_{field}")).upper()


class GroupSource(PydanticBaseSettingsSource):
    """Collects the variables of each group into one mapping."""

    def __init__(self, settings_cls: type[BaseSettings], groups: Mapping[str, Group]) -> None:
        super().__init__(settings_cls)
        self._groups = groups

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        """Return no value: single fields are not read here."""
        return None, field_name, False

    def __call__(self) -> dict[str, object]:
        """Return the set variables as a mapping of group to field to value."""
        # Like pydantic, which ignores the case of variables.
        environment = {name.upper(): value for name, value in os.environ.items()}
        found = {name: _read(name, group, environment) for name, group in self._groups.items()}
        return {name: values for name, values in found.items() if values}


def _read(name: str, group: Group, environment: Mapping[str, str]) -> dict[str, object]:
    """Return the set variables of one group as a mapping of field to value."""
    found: dict[str, object] = {}
    for field, hint in get_type_hints(group.kind, include_extras=True).items():
        variable = group.variable(name, field)
        if (text := environment.get(variable)) is not None:
            found[field] = _from_json(hint, text, variable) if get_origin(hint) is tuple else text
    return found


def _from_json(wanted: object, text: str, variable: str) -> object:
    """Return a value that is given as JSON; raise `InvalidRecipe` for other text."""
    with suppress(ValueError):
        return parse(wanted, json.loads(text), variable)
    raise InvalidRecipe(f"{variable} is no JSON: {text[:200]!r}", variable)
