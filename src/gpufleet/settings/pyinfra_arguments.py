"""pyinfra's own variables of a node: global arguments and connector keys.

They are in a separate module, because importing pyinfra takes 0.25 s, and inventories without these
variables do not need pyinfra.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

from pyinfra.api.arguments import all_global_arguments
from pyinfra.api.connectors import get_all_connectors
from pyinfra.api.util import raise_if_bad_type
from pyinfra.connectors.ssh import ConnectorData

SSH: Mapping[str, Any] = get_type_hints(ConnectorData)
"""The variables of pyinfra's SSH connector, with their types."""
ARGUMENTS: Mapping[str, Any] = {
    name: kind for name, kind in all_global_arguments() if name.startswith("_")
}
"""The arguments that every pyinfra operation accepts, with their types."""


def value_problem(key: str, value: Any) -> str | None:
    """
    Return why a value does not have the type of its variable.

    The result is None if the type is correct or unknown.
    """
    kind = SSH.get(key) or ARGUMENTS.get(key)
    if kind is None:
        return None
    try:
        raise_if_bad_type(value, kind, TypeError, key)
    except TypeError as error:
        return str(error)
    return None


def known_variables(node: str) -> frozenset[str]:
    """Return the variables that a node may have, for example `fake_delay` for `@fake/gpu-01`."""
    if not node.startswith("@"):
        return frozenset({*SSH, *ARGUMENTS})
    connector = _connectors().get(node[1:].split("/", maxsplit=1)[0])
    return frozenset({*SSH, *ARGUMENTS, *getattr(connector, "data_meta", {})})


@cache
def _connectors() -> Mapping[str, Any]:
    return dict(get_all_connectors())
