"""What a reader of JSON or YAML finds wrong is said in an operator's words."""

from __future__ import annotations

import json

import pytest
import yaml

from gpufleet.errors import answer_fault, file_fault, json_fault, yaml_fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the text is empty"),
        ('{"a": ', "is incomplete"),
        ("{a: 1}", "column 2: a name in double quotes"),
        ('{"a" 1}', "column 6: a `:` is missing"),
        ('{"a": 1 2}', "a `,` or a closing bracket"),
        ("{} 1", "column 4: the JSON value ends before that place"),
        ('["a', "has no closing quote"),
        ('["\\x"]', "JSON cannot escape"),
    ],
)
def test_json(text: str, says: str) -> None:
    with pytest.raises(json.JSONDecodeError) as found:
        json.loads(text)
    assert says in json_fault(found.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a:\n\tb: 1\n", "use spaces"),
        ("a: b: c\n", "inside a value"),
        ("a: 1\n b: 2\n", "inside a value"),
        ("a: [1\nb: 2\n", "closing bracket"),
        ("a: 'x\n", "ends before the closing quote of a text"),
        ("a: *b\n", "refers to an anchor that no `&` defines"),
        ("a: @x\n", "put quotes around the value"),
        ("a: \0\n", "a character that YAML does not allow"),
        ('a: "\\d"\n', "single quotes"),
    ],
)
def test_yaml(text: str, says: str) -> None:
    with pytest.raises(yaml.YAMLError) as found:
        yaml.safe_load(text)
    assert says in yaml_fault(found.value)


def test_what_is_no_text_and_what_cannot_be_opened() -> None:
    with pytest.raises(UnicodeDecodeError) as found:
        b"ab\xff".decode()
    assert file_fault(found.value) == "its byte 3 is not valid UTF-8"
    assert file_fault(FileNotFoundError(2, "No such file or directory")).startswith("No such file")


def test_an_answer_of_another_kind() -> None:
    assert answer_fault(TypeError("x")) == "a value has a different type than the program writes"
    assert answer_fault(RecursionError()).startswith("a number is too large, or the values")
