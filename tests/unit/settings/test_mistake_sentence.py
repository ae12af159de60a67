"""Whatever is written into a setting, what is said of it is a sentence that says what to write."""

from __future__ import annotations

import datetime as dt
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from gpufleet.settings.base import KeyPath
from gpufleet.settings.mistake_sentence import describe_mistake
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import SettingsError, parse_settings
from gpufleet.settings.serving_settings import Served
from tests.support.hostile import ANSWERED, PAGE
from tests.support.measured import note

HOSTILE: tuple[Any, ...] = (
    None,
    "",
    "x y",
    "32 parsecs",
    "é" * 300,
    -1,
    0,
    1.5,
    float("nan"),
    10**30,
    True,
    [],
    {},
    [1],
    [None],
    {"a": 1},
    {1: 1},
    dt.date(2026, 1, 1),
)
# What only a validator or a programmer says.
FOREIGN = re.compile(
    r"[Ii]nput should|valid (string|integer|tuple|dictionary)|match pattern|\^|\$$|\bparse(d|r)?\b"
    r"|instance of|validation|Traceback|None|True|False|another form"
)


def models(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in typing.get_args(kind):
        yield from models(part)


def fields(model: type[BaseModel], at: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path and the type of every key below settings: `m` in a mapping, 0 in a list."""
    for name, field in model.model_fields.items():
        text = str(field.annotation)
        yield (*at, name), text
        inside: KeyPath = ("m",) if "dict[" in text else (0,) if "tuple[" in text else ()
        for each in models(field.annotation):
            yield from fields(each, (*at, name, *inside))
        if inside and not any(True for _ in models(field.annotation)):
            yield (*at, name, *inside), text


def nested(at: KeyPath, value: Any) -> Any:
    for part in reversed(at):
        value = [value] if part == 0 else {part: value}
    return value


def said(data: Any) -> list[tuple[KeyPath, str]]:
    try:
        NodeSettings.model_validate(data)
    except ValidationError as error:
        return [describe_mistake(each) for each in error.errors()]
    return []


def test_no_refusal_of_any_key_has_a_validators_words() -> None:
    every = [at for at, _ in fields(NodeSettings)]
    assert len(every) > 300
    asked = refused = 0
    for at in every:
        for value in HOSTILE:
            asked += 1
            found = said(nested(at, value))
            refused += bool(found)
            for where, what in found:
                # What was written is quoted, and may say anything.
                ours = re.sub(r"\(got .*\)$", "", what)
                assert not FOREIGN.search(ours), (where, what)
                assert len(what) < 700, (where, what)
    assert asked > 6000
    assert refused > asked / 2
    what = f"{len(every)} keys of the settings, each with {len(HOSTILE)} odd values"
    note(PAGE, what, "`unit/settings/test_mistake_sentence.py`", str(asked), ANSWERED)


def test_true_is_read_only_where_a_switch_is_meant() -> None:
    switches = 0
    for at, kind in fields(NodeSettings):
        if any(where[: len(at)] in (at, at[:-1]) for where, _ in said(nested(at, True))):
            continue
        assert "bool" in kind, at
        switches += 1
    assert switches > 20


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (("cluster_network",), 10, "must be an IPv4 network, for example 10.0.0.0/24 (got 10)"),
        (("firewall", "clients", 0), 10, "must be a network, for example 10.0.0.0/24 (got 10)"),
        (("exporters", "listen"), True, "must be an IP address, for example 10.0.0.9 (got true)"),
        (("upgrade", "gates", "error_ratio"), True, "must be a number (got true)"),
        (("upgrade", "canary"), False, "must be a whole number (got false)"),
        (("gpus", "reserved", 0), True, "must be a whole number (got true)"),
        (
            ("vllm", "version"),
            0.33,
            'must be text: put the number in quotes, for example "0.33" (got 0.33)',
        ),
        (
            ("vllm", "version"),
            "0.33",
            "must be a release with three numbers, for example 0.33.0 (got '0.33')",
        ),
        (("serving", "m", "span_nodes"), "perhaps", "must be true or false (got 'perhaps')"),
        (("serving", "m", "port"), 99999, "must be at most 65535 (got 99999)"),
        (("serving", "m", "port"), None, "must be a whole number (the key has no value)"),
        (
            ("serving", "m", "presets"),
            "chat",
            "a list: write [one, another], or one line that begins with",
        ),
        (
            ("serving", "m", "objective"),
            "latncy",
            "must be balanced, latency, throughput or memory; did you mean 'latency'? "
            "(got 'latncy')",
        ),
        (
            ("serving", "m", "distributed_executor_backend"),
            "multi",
            "must be mp or ray (got 'multi')",
        ),
        (("cluster_network",), "10.0.0.1/24", "an IPv4 network, for example 10.0.0.0/24"),
        (("serving", "m", "revision"), "main", "must be a commit with all of its 40 digits"),
        (
            ("serving", "m", "served_name"),
            True,
            "put the word in quotes, because without quotes YAML reads yes,",
        ),
    ],
)
def test_a_mistake_says_what_to_write(key: KeyPath, value: Any, sentence: str) -> None:
    found = dict(said(nested(key, value)))
    assert sentence in found[key]


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("start_seconds", "10m", 600),
        ("start_seconds", "1h30m", 5400),
        ("start_seconds", "1h 30m", 5400),
        ("start_seconds", "600", 600),
        ("start_seconds", 600, 600),
        ("context", "32K", 32768),
        ("context", "32k", 32000),
        ("context", "131072", 131072),
        ("drain_seconds", "90s", 90),
    ],
)
def test_numbers_may_have_the_units_that_people_write(key: str, written: Any, read: int) -> None:
    served = Served.model_validate({"model": "/srv/m", key: written})
    assert getattr(served, key) == read


@pytest.mark.parametrize(
    ("key", "written", "wanted"),
    [
        (
            "start_seconds",
            "ten minutes",
            (
                "must be a number of seconds, for example 600, or a time with units, for example "
                "10m or 1h30m"
            ),
        ),
        ("start_seconds", "10 min", "must be a number of seconds"),
        ("start_seconds", "1.5h", "must be a number of seconds"),
        ("start_seconds", "9" * 400, "must be a number of seconds"),
        ("start_seconds", True, "must be a number of seconds"),
        ("start_seconds", "0s", "must be more than 0"),
        ("drain_seconds", "2h", "must be at most 3600"),
        ("context", "32kb", "must be a number of tokens"),
        ("context", -1, "must be more than 0"),
    ],
)
def test_other_units_are_refused_with_those_that_there_are(
    key: str, written: Any, wanted: str
) -> None:
    found = dict(said({"serving": {"m": {"model": "/srv/m", key: written}}}))
    assert found["serving", "m", key].startswith(wanted)


def test_a_mistake_of_the_settings_as_a_whole_has_no_key_in_front() -> None:
    with pytest.raises(SettingsError) as error:
        parse_settings({"serving": {"m": {"model": "/srv/m"}}})
    assert str(error.value).startswith("`serving` is set, but `vllm` is not")
