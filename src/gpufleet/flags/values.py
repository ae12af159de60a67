"""Convert a flag's texts to values, and find the texts that the release's parser refuses.

Pure. Contract: `read` never raises for an operator's mistakes. It returns the value, or the faults.
`read` parses numbers and JSON with the same functions as the parser: Python's `int`, `float` and
`json.loads`. Of the lists of accepted values, only those of the parser are used here
(`Flag.choices`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpufleet.errors import json_fault
from gpufleet.flags.command_line import GivenFlag
from gpufleet.flags.json_values import JsonFault, type_faults
from gpufleet.flags.normalize import human_readable
from gpufleet.flags.problem import Kind
from gpufleet.flags.schema import Flag, Schema, sort_key

_NONE = {"", "None"}
_PAIRS = ("0.8.5", "0.10.0")  # parse_type of vllm/engine/arg_utils.py accepts JSON or pairs
_ONE_LINE = re.compile("^{.*}$")
_OBJECT = re.compile(r"\s*{.*}\s*", re.DOTALL)
_OUTSIDE_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*")')
_SUFFIXED = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_STRAIGHT = str.maketrans("\u201c\u201d\u201e\u2018\u2019", '"""\'\'', "")
_LORA_3D = "0.22.0"  # LoRAModulePath.is_3d_lora_weight, entrypoints/openai/models/protocol.py
_SHOWN = 12  # maximum number of choices in a message; more would not help the reader


class InvalidValue(Exception):  # noqa: N818 - it is an answer, not an error
    """
    A text is not a value of the flag's type.

    `found` is the message. `better` is the correct text, if it is obvious.
    """

    def __init__(self, kind: Kind, found: str, better: str | None = None) -> None:
        super().__init__(found)
        self.kind = kind
        self.found = found
        self.better = better


@dataclass(frozen=True, slots=True)
class Fault:
    """
    A problem of a flag's values. `better` has the correct texts, or is None if they are not known.
    """

    kind: Kind
    found: str
    better: tuple[str, ...] | None = None
    since: str | None = None
    replacement: str | None = None


def read(schema: Schema, given: GivenFlag) -> tuple[Any, tuple[Fault, ...]]:
    """
    Return a flag's value from its texts, and the errors in them.

    The value is None if there is an error.
    """
    flag = given.flag
    if not flag.takes_value:
        return not given.negated, ()
    if flag.nargs == "?" and not given.values:
        return flag.const, ()
    values, faults = [], []
    for text in given.values:
        try:
            value, more = _one(schema, flag, text)
        except InvalidValue as unfit:
            better = _replaced(given.values, text, unfit.better)
            faults.append(Fault(unfit.kind, unfit.found, better))
        else:
            values.append(value)
            faults += more
    if faults:
        return None, tuple(faults)
    return (values if flag.nargs in {"+", "*"} or isinstance(flag.nargs, int) else values[-1]), ()


def _replaced(texts: tuple[str, ...], bad: str, better: str | None) -> tuple[str, ...] | None:
    if better is None:
        return None
    return tuple(better if text == bad else text for text in texts)


def _one(schema: Schema, flag: Flag, text: str) -> tuple[Any, list[Fault]]:
    if (
        flag.action == "StoreBoolean"
    ):  # a flag of old releases whose value is the word true or false
        if text.lower() in {"true", "false"}:
            return text.lower() == "true", []
        raise InvalidValue(Kind.VALUE, f"`{text}` is neither true nor false")
    kind = flag.type
    value: Any = text
    if kind is not None:
        if kind.optional and text in _NONE:
            value = None
        elif kind.json_class is not None:
            value = _json(_expanded(schema, text))
            faults = type_faults(schema, kind.json_class, value)
            return value, [_json_fault(fault) for fault in faults]
        elif _may_be_pairs(schema, flag) and not _ONE_LINE.match(text):
            value = _pairs(text)
        elif kind.base == "from_cli" and flag.name == "--compilation-config":
            value = _level_or_literal(text)
        else:
            value = _READERS.get(kind.base, _any)(text)
    if flag.choices is not None and value not in flag.choices:
        raise InvalidValue(Kind.CHOICE, *_not_among(text, value, flag.choices))
    if flag.action == "LoRAParserAction" and value:
        _lora(schema, text)
    if flag.action == "PromptAdapterParserAction" and "=" not in text:
        raise InvalidValue(Kind.VALUE, f"`{text}` is not in the form NAME=PATH")
    return value, []


def _not_among(text: str, value: Any, choices: tuple[Any, ...]) -> tuple[str, str | None]:
    names = [str(choice) for choice in choices if choice is not None]
    better = next((name for name in names if name.lower() == str(value).lower()), None)
    if better is None:
        from difflib import get_close_matches  # seldom needed, and slow to load

        near = get_close_matches(str(value), names, n=3)
    else:
        near = [better]
    if near and len(names) > _SHOWN:
        listed = f"of the {len(names)} accepted values, these are similar: {_listed(near)}"
    else:
        rest = len(names) - _SHOWN
        listed = f"choose from {_listed(names[:_SHOWN])}" + (
            f" and {rest} more" if rest > 0 else ""
        )
    return f"`{text}` is not an accepted value: {listed}", better


def _listed(names: list[str]) -> str:
    return ", ".join(names)


# -- readers, one for each `ValueType.base` --------------------------------------------------------


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = human_readable(text)
        found = f"`{text}` is not a whole number" if text else "the value is empty"
        if number is not None:
            raise InvalidValue(
                Kind.VALUE, f"{found}, and this flag accepts no suffix such as k or M", str(number)
            ) from None
        raise InvalidValue(Kind.VALUE, found) from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidValue(Kind.VALUE, f"`{text}` is not a number") from None


def _human(text: str) -> int:
    number = human_readable(text)
    if number is None:
        found = (
            f"`{text}` is not a whole number, alone or with a suffix: k m g t for powers of 1000"
        )
        raise InvalidValue(Kind.VALUE, f"{found}, or K M G T for powers of 1024 (without decimals)")
    return number


_SI = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_IEC = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SI_OR_IEC = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)")


def _si(text: str) -> int:
    """
    Parse a number in the same way as SGLang (`human_readable_int` of sglang/srt/utils/common.py).
    """
    match = _SI_OR_IEC.fullmatch(text.strip())
    if match is None:
        try:
            return int(text)
        except ValueError:
            raise InvalidValue(
                Kind.VALUE,
                f"`{text}` is not a whole number, alone or with a suffix: k M G T for powers of "
                "1000, or Ki Mi Gi Ti for powers of 1024 (without decimals)",
            ) from None
    number, suffix = match.groups()
    if suffix in _SI:
        return int(Decimal(number) * _SI[suffix])
    if "." in number:
        raise InvalidValue(
            Kind.VALUE, (f"`{text}` has decimals, which the suffix {suffix} does not allow")
        )
    return int(number) * _IEC[suffix]


def _human_or_auto(text: str) -> int:
    return -1 if text.strip().lower() in {"-1", "auto"} else _human(text)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidValue(
            Kind.JSON, f"`{text}` is not JSON: {json_fault(error)}", _mended(text)
        ) from None
    except ValueError:
        raise InvalidValue(
            Kind.JSON, (f"`{text}` is not valid JSON: it has a number with too many digits")
        ) from None
    except RecursionError:
        raise InvalidValue(
            Kind.JSON, (f"`{text}` is not valid JSON: it has too many nested levels")
        ) from None


def _json_or_text(text: str) -> Any:
    return _json(text) if _OBJECT.fullmatch(text) else text


def _lower(text: str) -> str:
    return text.lower().replace("-", "_")


def _pairs(text: str) -> dict[str, int]:
    """Parse `image=4,video=1`, which older releases accept instead of JSON."""
    found = {}
    for pair in text.split(","):
        key, equals, number = pair.strip().lower().partition("=")
        if not equals or not number.isdigit():
            raise InvalidValue(Kind.VALUE, f"`{text}` is not in the form KEY=NUMBER,KEY=NUMBER")
        if key in found:
            raise InvalidValue(Kind.VALUE, f"`{text}` has the key `{key}` twice")
        found[key] = int(number)
    return found


def _may_be_pairs(schema: Schema, flag: Flag) -> bool:
    """
    Return whether the release parses a value of this flag as KEY=NUMBER,... if it is no object.
    """
    is_json = flag.type is not None and flag.type.base == "json"
    return (
        is_json
        and not isinstance(flag.default, list)
        and flag.name != "--speculative-config"
        and sort_key(_PAIRS[0]) <= sort_key(schema.version) < sort_key(_PAIRS[1])
    )


def _level_or_literal(text: str) -> Any:
    """Parse the value of -O in releases before 0.9, which is a level or a Python dictionary."""
    if text in {"0", "1", "2", "3"}:
        return int(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        found = f"`{text}` is neither an optimization level (0 to 3) nor a Python dictionary"
        raise InvalidValue(Kind.VALUE, found) from None


def _any(text: str) -> str:
    """Return a text unchanged, because the schema has no type for it."""
    return text


_READERS: Mapping[str, Callable[[str], Any]] = {
    "int": _integer,
    "float": _float,
    "json": _json,
    "from_json": _json,
    "from_cli": _json,
    "json_or_str": _json_or_text,
    "human_readable_int": _human,
    "human_readable_int_or_auto": _human_or_auto,
    "lower_underscored": _lower,
    "si_int": _si,
    "nullable_kvs": _pairs,
}


def _expanded(schema: Schema, text: str) -> str:
    """Return JSON with numbers such as 1k written out, if the release accepts suffixes in JSON."""
    if not schema.syntax.json_suffixes:
        return text
    parts = _OUTSIDE_STRINGS.split(text)
    parts[::2] = [_SUFFIXED.sub(lambda match: str(_human(match[0])), part) for part in parts[::2]]
    return "".join(parts)


def _mended(text: str) -> str | None:
    """Return the corrected JSON if only the quotes of the text are wrong, else None."""
    straight = text.translate(_STRAIGHT)
    for candidate in (text.strip("'"), text.replace("'", '"'), straight.strip("'")):
        try:
            return json.dumps(json.loads(candidate))
        except (ValueError, RecursionError):
            continue
    try:
        literal = ast.literal_eval(text)
        return json.dumps(literal) if isinstance(literal, dict | list) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _json_fault(fault: JsonFault) -> Fault:
    better = None if fault.better is None else (fault.better,)
    return Fault(Kind.JSON, fault.found, better, fault.since, fault.replacement)


def _lora(schema: Schema, text: str) -> None:
    """
    Validate one value of --lora-modules, which is NAME=PATH or the JSON of LoRAModulePath.

    Raises `InvalidValue`.
    """
    if "=" in text and "," not in text:
        return
    value = _json(text)
    if not isinstance(value, dict):
        raise InvalidValue(
            Kind.JSON, (f"`{text}` is neither in the form NAME=PATH nor a JSON object")
        )
    if missing := [key for key in ("name", "path") if key not in value]:
        raise InvalidValue(Kind.JSON, f"`{text}` does not have the key {' and '.join(missing)}")
    known = {"name", "path", "base_model_name"}
    if sort_key(schema.version) >= sort_key(_LORA_3D):
        known.add("is_3d_lora_weight")
    if unknown := sorted(set(value) - known):
        raise InvalidValue(
            Kind.JSON, f"`{text}` has keys that a LoRA module does not have: {', '.join(unknown)}"
        )
