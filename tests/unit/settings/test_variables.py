"""Variables keep where they came from, and what Ansible lets pass in silence is refused."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet.errors import FleetError
from gpufleet.settings import variables
from tests.support.rows import each_row


@pytest.fixture
def written(tmp_path):
    """`written("a: 1")` is what reading a file of this content gives; it is called gpu.yml."""

    def read(text: str):
        (tmp_path / "gpu.yml").write_text(dedent(text))
        return variables.load_file(tmp_path / "gpu.yml", tmp_path)

    return read


def test_every_key_knows_its_line_also_the_nested_ones(written):
    found = written(
        """\
        # a comment
        vllm:
          version: 0.32.0

          environment: {A: b}
        serving:
          tiny:
            flags:
              - one
              - two
        """
    )
    vllm, models = found["vllm"][1], found["serving"][1]

    assert str(vllm) == "gpu.yml:2"
    assert str(vllm.place_of("environment", "A")) == "gpu.yml:5"
    assert str(models.place_of("tiny", "flags", 1)) == "gpu.yml:10"


def test_a_key_that_was_not_written_is_placed_at_the_nearest_one_above(written):
    """So `is needed and not set` names the mapping in which it is missing."""
    _, origin = written("a:\n  b:\n    c: 1\n")["a"]

    assert str(origin.place_of("b", "missing", "deeper")) == "gpu.yml:2"
    assert str(origin.place_of("missing")) == "gpu.yml:1"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        pytest.param("a: 1\nb: 2\na: 3\n", 3, "a is set twice, first in line 1", id="twice"),
        pytest.param("a:\n  b: 1\n  b: 2\n", 3, "a.b is set twice", id="twice-nested"),
        pytest.param("a:\n- b: 1\n  b: 2\n", 3, "a.0.b is set twice", id="twice-in-a-list"),
        pytest.param("ok: 1\nno-name: 2\n", 2, "'no-name' cannot be the name", id="dash"),
        pytest.param("1: x\n", 1, "'1' cannot be the name", id="number"),
        pytest.param("on: x\n", 1, "'on' cannot be the name", id="yaml-1.1-boolean"),
        pytest.param("- a\n- b\n", 1, "the top level must be a mapping of settings", id="list"),
        pytest.param("just text\n", 1, "the top level must be a mapping of settings", id="text"),
        pytest.param("a: [1\nb: 2\n", 2, "is not valid YAML", id="open-bracket"),
        pytest.param("a:\n\tb: 1\n", 2, "use spaces", id="tab"),
        pytest.param("a: 1\n---\nb: 2\n", 2, "is not valid YAML", id="two-documents"),
        pytest.param("a: !vault |\n  x\n", 1, "type !vault", id="vault"),
        pytest.param("a: {1: x}\n", 1, "YAML reads as int", id="nested-number"),
        pytest.param("a: &self [*self]\n", 1, "refers to itself", id="recursion"),
    ],
)
def test_what_is_refused_names_file_and_line(written, text, line, says):
    with pytest.raises(FleetError) as refused:
        written(text)

    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].startswith(f"gpu.yml:{line}: ")
    assert says in refused.value.problems[0]


def test_all_problems_of_a_file_are_said_at_once(written):
    with pytest.raises(FleetError) as refused:
        written("a: 1\na: 2\nb: {c: 1, c: 2}\n")

    assert len(refused.value.problems) == 2


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: \x00\n"])
def test_what_is_no_text_is_refused_by_name(tmp_path, content):
    (tmp_path / "gpu.yml").write_bytes(content)

    with pytest.raises(FleetError, match=r"^gpu\.yml"):
        variables.load_file(tmp_path / "gpu.yml", tmp_path)


def test_a_file_of_comments_sets_nothing(written):
    assert written("# nothing\n") == {}


def test_anchors_and_merge_keys_read_as_yaml_has_them(written):
    found = written("base: &base {a: 1, b: 2}\nmore:\n  <<: *base\n  b: 3\n")

    assert found["more"][0] == {"a": 1, "b": 3}


# What YAML treats specially, beside ordinary letters.
text = st.text(alphabet="ab0 :#-&*!|>%@`'\"{}[],\n\t=<~é\u2028", max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(text, below, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)  # the time of a file system, on a machine that does other things
@given(st.dictionaries(st.sampled_from(["vllm", "cuda", "_sudo", "serving"]), plain))
def test_plain_data_comes_back_as_it_was_written(tmp_path_factory, data):
    """Whatever JSON can say, YAML's own writer writes, and reading returns, each key placed."""
    path = tmp_path_factory.mktemp("vars") / "gpu.yml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")

    found = variables.load_file(path)

    assert {key: value for key, (value, _) in found.items()} == data
    assert all(origin.line for _, origin in found.values())
    json.dumps(data)


# -- which files, and which value ------------------------------------------------------------------


def test_a_later_layer_replaces_the_whole_value(tmp_path):
    """As in Ansible: mappings are not merged into each other."""
    for name, text in {"all.yml": "a: {x: 1}\nb: 1\n", "gpu.yml": "a: {y: 2}\n"}.items():
        (tmp_path / name).write_text(text)

    merged = variables.merge(
        variables.load([tmp_path], "all", tmp_path), variables.load([tmp_path], "gpu", tmp_path)
    )

    assert merged["a"][0] == {"y": 2}
    assert str(merged["a"][1]) == "gpu.yml:1"
    assert str(merged["b"][1]) == "all.yml:2"


def test_a_group_may_be_a_file_and_a_directory_of_files(tmp_path):
    """The directory is read behind the file, its files by name; hidden files are not."""
    files = {
        "gpu.yaml": "a: file\nb: file\nc: file\n",
        "gpu/10.yml": "b: ten\nc: ten\n",
        "gpu/20.yaml": "c: twenty\n",
        "gpu/.20.yml.swp.yml": "c: hidden\n",
        "gpu/README.md": "not: read",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    found = variables.load([tmp_path], "gpu", tmp_path)

    assert {key: (value, str(origin)) for key, (value, origin) in found.items()} == {
        "a": ("file", "gpu.yaml:1"),
        "b": ("ten", "gpu/10.yml:1"),
        "c": ("twenty", "gpu/20.yaml:1"),
    }


def test_two_spellings_of_one_file_are_refused(tmp_path):
    """Reading one of them would ignore the other without a word."""
    for name in ("gpu.yml", "gpu.yaml"):
        (tmp_path / name).write_text("a: 1\n")

    with pytest.raises(FleetError, match=r"gpu\.yml and gpu\.yaml set variables of the same name"):
        variables.load([tmp_path], "gpu", tmp_path)


def test_mistakes_of_several_files_are_said_together(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
        (directory / "gpu.yml").write_text("a: [\n")

    with pytest.raises(FleetError) as refused:
        variables.load([first, second], "gpu", tmp_path)

    assert [Path(each.split(":")[0]).parent.name for each in refused.value.problems] == [
        "first",
        "second",
    ]


def test_a_date_is_its_text(tmp_path):
    """A setting that means a day parses it; anywhere else it is what the operator wrote."""
    (tmp_path / "gpu.yml").write_text("a: 2026-11-21\nb: 2026-11-21 10:00:00\n")

    found = variables.load_file(tmp_path / "gpu.yml")

    assert [value for value, _ in found.values()] == ["2026-11-21", "2026-11-21 10:00:00"]


@each_row(
    "text",
    [
        "gpus: {name: {{ x }}}\n",
        "gpus:\n  name: {{ x }}\n",
        "ssh_user: {{ user }}\n",
        "gpus: {name: '{{ x | default(1) }}'}\n",
        "also: [{{ b }}]\n",
    ],
)
def test_a_jinja_template_is_named_as_one(tmp_path: Path, text: str) -> None:
    """Ansible fills in templates; unquoted ones are mappings as keys to YAML."""
    file = tmp_path / "gpu.yml"
    file.write_text(text)

    with pytest.raises(FleetError, match="is a Jinja template, which Ansible would") as refused:
        variables.load_file(file)

    (said,) = refused.value.problems
    assert "write the value itself" in said


def test_a_template_of_a_flag_is_text(tmp_path: Path) -> None:
    file = tmp_path / "gpu.yml"
    file.write_text("serving: {m: {flags: {chat-template: '{{ messages }}'}}}\n")

    assert variables.load_file(file)["serving"][0]["m"]["flags"] == {
        "chat-template": "{{ messages }}"
    }
