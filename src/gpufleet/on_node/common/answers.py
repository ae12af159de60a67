"""RUNS ON THE NODE: read facts, or the reasons why they are missing.

A value that could not be read is {"missing": reason, ...}, so that "no" and "unknown" are always
distinct. The reason is one word. NVML's error code, a signal or the loader's error text may be
added to it. The output is always valid JSON, even if the driver returns garbage.
"""

from __future__ import annotations

import errno
import math
from typing import Any, Callable, Dict

Missing = Dict[str, Any]  # {"missing": reason, ...}

# Error codes of nvmlReturn_t (nvml.h). For a code that is not in this table the reason is
# "nvml_error". The code itself is always reported too.
REASONS = {
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    6: "not_found",
    9: "driver_not_loaded",
    10: "timeout",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "lost",
    16: "reset_required",
    17: "operating_system",
    18: "version_mismatch",
    25: "version",
    999: "unknown",
}
ERRNO_REASONS = {
    errno.ENOENT: "absent",
    errno.ENODEV: "absent",
    errno.ESRCH: "absent",  # a process that ended between two queries
    errno.EADDRNOTAVAIL: "absent",  # a net device without an address
    errno.EACCES: "no_permission",
    errno.EPERM: "no_permission",
    errno.EINVAL: "not_supported",  # the speed of a net device without a link
    errno.EOPNOTSUPP: "not_supported",
}

# The exceptions of a parser that reads an answer of an unexpected form. An integer that is too
# large for a float raises OverflowError.
OTHER_FORM = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


class CannotRead(Exception):  # noqa: N818  # an answer, not an error
    """Raised for a value that cannot be read, for a known reason."""

    def __init__(self, reason: str, **more: Any) -> None:
        super().__init__(reason)
        self.missing = missing(reason, **more)


def missing(reason: str, **more: Any) -> Missing:
    """Return the placeholder for a value that could not be read."""
    return {"missing": reason, **more}


def read(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; return its value as JSON types, or the reason why the value is missing."""
    try:
        return to_json_types(function(*arguments))
    except Exception as error:
        return to_json_types(missing_after(error))


def missing_after(error: Exception) -> Missing:
    """Return the placeholder of a missing value, with the reason from the raised exception."""
    if isinstance(error, CannotRead):
        return error.missing
    code = getattr(error, "value", None)
    if type(error).__name__.startswith("NVMLError") and isinstance(code, int):
        detail = {"detail": loader_error()} if code == 12 else {}
        return missing(REASONS.get(code, "nvml_error"), code=code, **detail)
    if isinstance(error, OSError) and error.errno in ERRNO_REASONS:
        return missing(ERRNO_REASONS[error.errno])
    if isinstance(error, ImportError):
        return missing("no_binding" if error.name == "pynvml" else "no_ctypes", detail=str(error))
    return missing("error", detail="%s: %s" % (type(error).__name__, error))


def loader_error() -> str:
    """
    Return the loader's error text for NVML's library. The binding does not report this error.
    """
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return str(error)
    return "the library can be loaded now"


def is_missing(value: Any) -> bool:
    """Return whether a value is the placeholder for one that could not be read."""
    return isinstance(value, dict) and "missing" in value


def to_json_types(value: Any) -> Any:
    """
    Convert a value of NVML's binding (bytes, struct, array, tuple) to JSON types.

    Values that JSON cannot represent are replaced: bytes that are not UTF-8, lone surrogates (file
    names), NaN and infinity.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return missing("implausible", detail=str(value))
    if isinstance(value, dict):
        return {key: to_json_types(item) for key, item in value.items()}
    if hasattr(value, "_fields_"):
        # The first word of a versioned struct is its size, which is not a fact about the node.
        members = [name for name, *_ in value._fields_ if name != "version"]
        return {name: to_json_types(getattr(value, name)) for name in members}
    if isinstance(value, (list, tuple)) or hasattr(value, "_length_"):
        return [to_json_types(item) for item in value]
    return value
