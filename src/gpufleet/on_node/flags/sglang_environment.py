"""RUNS ON THE NODE: list the environment variables of an SGLang release, with types and defaults.

SGLang declares the variables as attributes of one class, for example `SGLANG_X = EnvBool(False)`.
If a value is invalid, SGLang prints a warning and uses the default (`EnvField.get`). Because no
text stops SGLang, variables have no `form`.
"""

from __future__ import annotations

import os
from typing import Any, Dict

from gpufleet.on_node.flags.document import to_json_types
from gpufleet.on_node.flags.partial_import import UNBOUND, Modules
from gpufleet.on_node.flags.placeholder import TruthTests, is_absent

_MODULE = "sglang.srt.environ"
# {class of a declaration: the type of value that it reads}
_TYPES = {
    "EnvBool": "bool",
    "EnvInt": "int",
    "EnvFloat": "float",
    "EnvStr": "str",
    "EnvTuple": "tuple",
    "EnvJSON": "json",
}
_HOME = "/root"  # as for vLLM, so that paths are the same on every machine


def variables(modules: Modules) -> Dict[str, Dict[str, Any]]:
    """Return every declared variable with `type`, `default`, and `also` (its older names)."""
    field = modules.value(_MODULE, "EnvField")
    if field is not UNBOUND and not is_absent(field):
        # SGLang sets this to False after the class has been created.
        field._allow_set_name = True  # noqa: SLF001
    declared = modules.value(_MODULE, "Envs")
    if declared is UNBOUND or is_absent(declared):
        return {}
    outside, os.environ["HOME"] = os.environ.get("HOME"), _HOME
    try:
        return {
            name: _variable(field)
            for name, field in vars(declared).items()
            if hasattr(field, "default") and hasattr(field, "parse")
        }
    finally:
        os.environ.pop("HOME")
        if outside is not None:
            os.environ["HOME"] = outside


def _variable(field: Any) -> Dict[str, Any]:
    types = [_TYPES[one.__name__] for one in type(field).__mro__ if one.__name__ in _TYPES]
    entry: Dict[str, Any] = {"type": types[0] if types else None, "default": _default(field)}
    if hasattr(field, "deprecated_name"):
        entry["also"] = [field.deprecated_name]
    return entry


def _default(field: Any) -> Any:
    """
    Return a variable's default.

    If the default depends on the machine or on a package, return {"$runtime": ...}.
    """
    before = TruthTests.count
    try:
        value = field.default() if callable(field.default) else field.default
    except Exception:
        return {"$runtime": getattr(field.default, "__name__", None)}
    if TruthTests.count != before:
        return {"$runtime": getattr(field.default, "__name__", None)}
    return to_json_types(value)
