"""Every setting can be looked up, and what is printed of it is true."""

from __future__ import annotations

import json
from typing import Annotated, Any

import jsonschema
import pytest
import yaml
from pydantic import TypeAdapter

from gpufleet.errors import FleetError
from gpufleet.settings import lookup
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import parse_settings
from tests.support.checkout import ROOT
from tools import settings_reference

ALL = lookup.all_settings()


def fields(model: Any, above: str = "") -> dict[str, Any]:
    """{key: its field} of all settings that are no section."""
    found = {}
    for name, field in model.model_fields.items():
        below = list(lookup._models(field.annotation))
        if not below:
            found[f"{above}{name}"] = field
        for kind, way in below:
            found |= fields(kind, f"{above}{name}{way}.")
    return found


FIELDS = fields(NodeSettings)


def test_every_setting_has_a_description_a_type_and_a_default():
    bare = [key for key, each in ALL.items() if not (each.description and each.type)]

    assert bare == []
    assert [key for key, each in ALL.items() if not each.default] == []
    assert set(FIELDS) == {key for key, each in ALL.items() if each.type != "section"}


def test_every_number_has_a_unit():
    numbers = [
        key
        for key, field in FIELDS.items()
        if {int, float} & set(lookup._scalars(field.annotation))
    ]

    assert len(numbers) > 70
    assert [key for key in numbers if not ALL[key].unit] == []


def test_every_example_is_a_value_that_the_setting_takes():
    for key, field in FIELDS.items():
        ((name, value),) = yaml.safe_load(ALL[key].example).items()
        assert name == key.rpartition(".")[2]
        assert value not in (None, [], {}), f"{key}: add an example to settings/data/examples.yml"
        TypeAdapter(Annotated[field.annotation, field]).validate_python(value)


def test_no_example_is_of_a_setting_that_there_is_not():
    kinds = {type_.__name__: type_ for type_ in _classes(NodeSettings)}
    for written in lookup._examples():
        kind, _, name = written.partition(".")
        named = [each for each in kinds.values() if kind in {m.__name__ for m in each.__mro__}]
        assert any(name in each.model_fields for each in named), written


def _classes(model: Any) -> set[Any]:
    found = {model}
    for field in model.model_fields.values():
        for kind, _ in lookup._models(field.annotation):
            found |= _classes(kind)
    return found


@pytest.mark.parametrize(
    ("key", "first", "more"),
    [
        ("serving.*.context", "serving.*.context", False),
        ("serving.qwen3-32b.context", "serving.*.context", False),
        ("gateway.clients.web.name", "gateway.clients.*.name", False),
        ("vllm.", "vllm", True),
        ("serving.qwen3-32b", "serving.*.model", True),
    ],
)
def test_a_key_is_found_with_names_of_yours_and_a_section_with_all_below(key, first, more):
    found = lookup.find_settings(key)

    assert found[0].key == first
    assert (len(found) > 1) is more


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("vlm", "did you mean 'vllm'"),
        ("serving.qwen.contex", r"did you mean 'serving\.\*\.context'"),
        ("vllm.api_key", "did you mean 'vllm.api_key_file'"),
    ],
)
def test_a_key_that_no_setting_has_is_refused_with_a_near_one(key, says):
    with pytest.raises(FleetError, match=says):
        lookup.find_settings(key)


def test_the_reference_page_and_the_schema_are_as_the_settings_are():
    """Otherwise: `python -m tools.settings_reference`."""
    assert settings_reference.PAGE.read_text() == settings_reference.page()
    assert settings_reference.SCHEMA.read_text() == settings_reference.schema()


SCHEMA = json.loads(lookup.schema_text())


@pytest.mark.parametrize(
    "file",
    [*sorted((ROOT / "group_vars").glob("*.yml")), *sorted((ROOT / "examples").rglob("*.yml"))],
    ids=lambda file: "/".join(file.parts[-3:]),
)
def test_the_schema_takes_the_files_that_are_shipped(file):
    jsonschema.validate(yaml.safe_load(file.read_text()) or {}, SCHEMA)


@pytest.mark.parametrize(
    ("wrong", "at"),
    [
        ({"vlm": {}}, "vlm"),
        ({"vllm": {"versoin": "0.32.0"}}, "versoin"),
        ({"upgrade": {"confirm": "never"}}, "never"),
        ({"serving": {"a": {"port": 0}}}, "0"),
    ],
)
def test_the_schema_refuses_what_no_setting_takes(wrong, at):
    with pytest.raises(jsonschema.ValidationError, match=at):
        jsonschema.validate(wrong, SCHEMA)


def test_the_schema_takes_units_and_what_pyinfra_knows():
    with_units = {
        "ssh_user": "root",
        "_sudo": True,
        "vllm": {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1"},
        "serving": {"a": {"model": "/m", "context": "32K", "start_seconds": "10m"}},
        "firewall": {"open": [{"ports": "8000-8010"}, {"ports": 9000}]},
        "upgrade": {"waves": [1, "25%"]},
    }

    jsonschema.validate(with_units, SCHEMA)
    parse_settings({key: each for key, each in with_units.items() if key in ALL})
