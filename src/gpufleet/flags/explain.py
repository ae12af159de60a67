"""Explain a flag or variable, and how each release treats it. Pure.

Contract: data/explanations/*.json has the purpose, use and cost of each name, but nothing that is
specific to one release. Whether a release has the name, and its default, type and values there,
come from the schemas. Replacements come from `changes`. The pages are therefore correct for every
release.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from gpufleet.catalog import presets
from gpufleet.errors import FleetError
from gpufleet.flags import changes, history, schema
from gpufleet.flags.changes import Change
from gpufleet.flags.history import Span
from gpufleet.flags.schema import Computed, Flag, FlagKind, Schema, Variable

_SHOWN_VALUES = 16  # maximum number of values on a page; --json prints all values


@dataclass(frozen=True, slots=True)
class Entry:
    """
    gpufleet's explanation of one name.

    `cost` describes the cost in memory, latency or throughput. It is None if there is no cost.
    """

    name: str
    does: str
    use: str
    cost: str | None = None
    related: tuple[str, ...] = ()


@cache
def entries() -> Mapping[str, Entry]:
    """Return every explanation, by the name of its flag (with dashes) or variable."""
    folder = resources.files("gpufleet.flags").joinpath("data/explanations")
    found: dict[str, Entry] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        for name, words in json.loads(file.read_text("utf-8")).items():
            if name in found:
                raise ValueError(f"data/explanations/{file.name}: {name} is explained twice")
            found[name] = Entry(
                name,
                words["does"],
                words["use"],
                words.get("cost"),
                tuple(words.get("related", ())),
            )
    return found


@dataclass(frozen=True)
class Explanation:
    """
    The explanation of one name.

    `entry` is gpufleet's own explanation, or None if there is none. `there` is the flag or variable
    in release `version`, or None if this release does not have the name. `accepted` has the ranges
    of packaged releases that accept the name. `defaults` has the ranges of releases with the same
    default. If the name is an alias or a negation, `base` is the name of its flag.
    """

    name: str
    version: str
    entry: Entry | None
    there: Flag | Variable | None
    values: tuple[str, ...]
    base: str | None
    negation: bool
    accepted: tuple[Span, ...]
    defaults: tuple[Span, ...]
    known: tuple[Change, ...]

    @property
    def presets(self) -> tuple[str, ...]:
        """The presets that set the flag."""
        return presets.presets_setting(self.name)

    @property
    def removal_reason(self) -> Change | None:
        """
        Return why the release does not have the name.

        None if the release has the name, or if the reason is unknown.
        """
        return None if self.there else changes.removal_reason(self.name, self.version)

    def as_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        entry, there = self.entry, self.there
        return {
            "name": self.name,
            "vllm": self.version,
            "does": entry.does if entry else None,
            "use": entry.use if entry else None,
            "cost": entry.cost if entry else None,
            "related": list(entry.related) if entry else [],
            "presets": list(self.presets),
            "stands_for": self.base,
            "negation": self.negation,
            "accepted": there is not None,
            "type": _type(there) if there else None,
            "values": list(self.values),
            "options": list(there.options) if isinstance(there, Flag) else [],
            "hidden": isinstance(there, Flag) and self.name in there.hidden,
            "deprecated": isinstance(there, Flag) and there.deprecated,
            "default": _plain(there.default) if there else None,
            "accepted_in": [{"first": span.first, "last": span.last} for span in self.accepted],
            "defaults": [
                {"first": span.first, "last": span.last, "default": _plain(span.value)}
                for span in self.defaults
            ],
            "changes": [change.as_json() for change in self.known],
        }


def explain_flag(name: str, release: Schema | None = None) -> Explanation:
    """
    Return the explanation of a flag or variable in `release`, by default the newest packaged one.

    Dashes may be omitted, or written as underscores. For a short option, the result explains its
    flag. For --x-config.key, the result explains --x-config. Raises `FleetError` if no release, no
    explanation and no entry in the table of changes has the name.
    """
    release = release or schema.load(schema.versions()[-1])
    wanted = _resolved(name)
    variable = not wanted.startswith("-")
    past: Mapping[str, Flag | Variable | None] = (
        history.variable_history(wanted) if variable else history.flag_history(wanted)
    )
    there: Flag | Variable | None = (
        release.environment.get(wanted) if variable else release.flag(wanted)
    )
    newest = there or next((one for one in reversed([*past.values()]) if one), None)
    words = entries().get(wanted)
    if newest is None and words is None and not changes.changes_of(wanted):
        raise FleetError(_unknown(name, wanted))
    base, negation = None, False
    if isinstance(newest, Flag) and newest.name != wanted:
        base, negation = newest.name, newest.negates(wanted)
    if words is None and base and not negation:
        words = entries().get(base)
    return Explanation(
        name=wanted,
        version=release.version,
        entry=words,
        there=there,
        values=_values(release, there),
        base=base,
        negation=negation,
        accepted=tuple(history.spans(past, lambda _: None)),
        defaults=tuple(history.spans(past, lambda one: one.default)),
        known=changes.changes_of(wanted),
    )


def matching(text: str, release: Schema) -> dict[str, str]:
    """
    Return a release's flags and variables that match a text, each with its purpose.

    A name matches if it contains all words of the text. If no name matches, the explanations are
    searched instead.
    """
    words = re.split(r"[\s_-]+", text.strip().lower())
    known = entries()
    names = [flag.name for flag in release.flags if flag.name.startswith("--")]
    does = {
        name: known[name].does if name in known else ""
        for name in [*names, *sorted(release.environment)]
    }
    in_name = {name: told for name, told in does.items() if _has(name, words)}
    return in_name or {name: told for name, told in does.items() if _has(told, words)}


def _has(text: str, words: Sequence[str]) -> bool:
    return all(word in text.lower() for word in words)


def matching_page(text: str, found: Mapping[str, str], release: Schema, width: int) -> str:
    """Return the matches as text, with one line of at most `width` columns for each match."""
    widest = max(map(len, found))
    lines = [
        textwrap.shorten(
            f"{name.ljust(widest + 1, chr(0))} {does}", width, placeholder="..."
        ).replace(chr(0), " ")
        for name, does in found.items()
    ]
    return "\n".join([f"vLLM {release.version}: flags and variables about {text}", "", *lines])


def explanation_page(found: Explanation, width: int) -> str:
    """Return the explanation as text, `width` columns wide."""
    blocks = [_heading(found, width)]
    if found.entry:
        paragraphs = [found.entry.does, found.entry.use, found.entry.cost]
        blocks += [textwrap.fill(text, width) for text in paragraphs if text]
    else:
        blocks.append(
            textwrap.fill(
                "gpufleet has no explanation of this name yet. The following facts come from the "
                "releases of vLLM.",
                width,
            )
        )
    blocks.append("\n".join(_wrapped(label, text, width) for label, text in _facts(found)))
    return "\n\n".join(blocks)


def _heading(found: Explanation, width: int) -> str:
    if not found.base:
        return found.name
    what = "the negation of" if found.negation else "another name of"
    text = f"{found.name}, {what} {found.base}"
    return textwrap.fill(text, width, break_on_hyphens=False)


def _facts(found: Explanation) -> Iterator[tuple[str, str]]:
    yield f"vLLM {found.version}", _state(found)
    if found.values:
        shown = ", ".join(found.values[:_SHOWN_VALUES])
        more = len(found.values) - _SHOWN_VALUES
        yield (
            "Values",
            (f"{shown}, and {more} more (--json lists all of them)") if more > 0 else shown,
        )
    yield (
        "Releases",
        ", ".join(map(str, found.accepted)) or ("no release that gpufleet knows has this name"),
    )
    if found.defaults and not found.negation:
        yield (
            "Default",
            "; ".join(
                f"{shown_default(span.value)} ({span})"
                if len(found.defaults) > 1
                else shown_default(span.value)
                for span in found.defaults
            ),
        )
    for number, change in enumerate(found.known):
        yield "" if number else "Changes", _change(change)
    if found.presets:
        yield "Presets", ", ".join(found.presets)
    if found.entry and found.entry.related:
        yield "Related", ", ".join(found.entry.related)


def _state(found: Explanation) -> str:
    there = found.there
    if there is not None:
        said = f"accepted, {_type(there)}"
        if isinstance(there, Flag):
            others = [option for option in there.options if option != found.name]
            if others:
                said += f"; other names: {', '.join(others)}"
            if found.name in there.hidden or there.help_hidden:
                said += "; not in vLLM's help"
            if there.deprecated:
                said += "; deprecated"
        return said
    gone = found.removal_reason
    if gone is None:
        if not found.accepted and not found.name.startswith(("-", "VLLM_")):
            return "vLLM does not read this variable, but a library that vLLM uses reads it"
        return "does not have this name"
    what = "ignores it" if gone.is_variable else "refuses it"
    return f"{what}; instead: {gone.replacement}" if gone.replacement else f"{what}: leave it out"


def _change(change: Change) -> str:
    head = f"since {change.since}" if change.since else "in every release"
    if change.until:
        head += f", until {change.until}"
    about = change.kind.value
    if change.values:
        about += f" {', '.join(change.values)}"
    said = f"{head}: {about}: {change.why}"
    if change.when:
        said += f" (if {change.when})"
    if change.replacement:
        said += f"; instead: {change.replacement}"
    return f"{said}; then: {change.then}" if change.then else said


def _type(there: Flag | Variable) -> str:
    if isinstance(there, Variable):
        said = there.type or "text"
        is_optional = said.startswith("Optional[") and said.endswith("]")
        return said[len("Optional[") : -1] if is_optional else said
    if there.kind is FlagKind.PAIR:
        return "a switch that can be negated" if there.negations else "a switch"
    if there.kind is FlagKind.SWITCH:
        return "a switch"
    if there.type is None:
        said = "text"
    elif there.type.json_class:
        said = f"JSON ({there.type.json_class})"
    else:
        said = _TYPES.get(there.type.base, there.type.base)
    if there.kind is FlagKind.APPEND:
        return f"{said}, and the flag may be given several times"
    return f"{said}, several values" if there.nargs in {"+", "*"} else said


_TYPES = {
    "str": "text",
    "nullable_str": "text",
    "int": "whole number",
    "float": "number",
    "json": "JSON",
    "json_or_str": "JSON or text",
    "human_readable_int": "whole number (1k = 1000, 1K = 1024)",
    "human_readable_int_or_auto": "whole number (1k = 1000, 1K = 1024) or auto",
    "custom": "text",
}


def _values(release: Schema, there: Flag | Variable | None) -> tuple[str, ...]:
    if there is None:
        return ()
    listed: tuple[Any, ...] = there.choices or ()
    if isinstance(there, Flag):
        listed = listed or there.suggested or release.values.get(there.dest, ())
    return tuple(dict.fromkeys("None" if value is None else str(value) for value in listed))


def shown_default(value: Any) -> str:
    """Format a default for display."""
    if isinstance(value, Computed):
        return {
            "object": f"the defaults of {value.what}",
            "factory": "vLLM sets it at the start",
            "runtime": "vLLM decides at the start",
            "suppress": "none (vLLM passes the flag on only if you set it)",
            "unset": "none (you must set a value)",
        }.get(value.how, value.how)
    if value is None:
        return "none (vLLM decides)"
    if isinstance(value, bool):
        return "on" if value else "off"
    return '""' if value == "" else value if isinstance(value, str) else json.dumps(value)


def _plain(value: Any) -> Any:
    return {f"${value.how}": value.what} if isinstance(value, Computed) else value


def _wrapped(label: str, text: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=f"{label:<14}",
        subsequent_indent=" " * 14,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _resolved(name: str) -> str:
    """Return the name as the tables write it: with dashes, and without a JSON key."""
    if name in entries():
        return name
    if not name.startswith("-"):
        if name.isupper():
            return name
        name = f"--{name}"
    if name.startswith("--"):
        name = name.partition(".")[0].partition("=")[0]
        if name not in entries():  # one entry is about a spelling with capitals
            name = name.replace("_", "-")
    elif any(name == known.name for known in changes.changes()):
        return name
    elif (flag := schema.load(schema.versions()[-1]).by_option.get(name)) is not None:
        return flag.name
    return name


def _unknown(name: str, wanted: str) -> str:
    import difflib  # imported only for an unknown name: slow

    newest = schema.load(schema.versions()[-1])
    known = sorted({*entries(), *newest.by_option, *newest.environment})
    near = difflib.get_close_matches(wanted, known, 3, 0.7)
    hint = f": did you mean {' or '.join(near)}?" if near else ""
    oldest = schema.versions()[0]
    return (
        f"no release of vLLM from {oldest} to {newest.version} has {name}, and no guide that "
        f"gpufleet knows mentions this name{hint}"
    )
