"""Reading a release: from wherever it lies, whole, without running what is not needed."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpufleet.cli.flags_command import flags
from gpufleet.errors import FleetError
from gpufleet.flags import extract, schema
from tests.support import packaged_metrics
from tests.unit.flags import small_release


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_release.tree(tmp_path / "source")


@pytest.fixture
def interpreter(tmp_path: Path, source: Path) -> Path:
    """A Python beside which the small release, and packages that must not be touched, are."""
    for name in ("torch", "transformers", "pydantic", "uvloop"):
        trap = f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\n"
        (source / f"{name}.py").write_text(trap)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={source} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def broken(source: Path, path: str, text: str) -> str:
    (source / path).write_text(text)
    return str(source)


def test_everything_that_the_parser_takes_is_found(source):
    found = schema.from_document(extract.flag_document(str(source)))

    assert found.version == small_release.VERSION
    assert set(found.by_option) == {
        "--headless", "--secret", "--model", "--dtype", "--eager", "--no-eager", "--names",
        "--device", "--lower", "--no-lower", "--higher", "--no-higher", "--outer", "--width", "-w",
        "--backend", "--chance",
    }  # fmt: skip
    by_name = {flag.name: flag for flag in found.flags}
    assert found.positional.nargs == "?"
    assert by_name["--headless"].kind is schema.FlagKind.SWITCH
    assert by_name["--eager"].kind is schema.FlagKind.PAIR
    assert by_name["--eager"].deprecated
    assert not by_name["--model"].deprecated
    assert by_name["--secret"].help_hidden
    assert by_name["--names"].nargs == "+"
    assert by_name["--dtype"].choices == ("auto", "half")
    assert by_name["--model"].type == schema.ValueType("str", optional=True)
    assert by_name["--model"].default == "facebook/opt-125m"
    assert by_name["--width"].aliases == ("-w",)
    assert by_name["--backend"].type == schema.ValueType("lower_underscored")
    assert by_name["--outer"].type == schema.ValueType("json", True, "OuterConfig")
    assert by_name["--outer"].default == schema.Computed("object", "OuterConfig")
    assert found.syntax == schema.Syntax(underscores=True)


def test_the_machine_has_no_part_in_it(source):
    """The platform is CUDA's everywhere, and variables of whoever runs it do not count."""
    found = {
        flag.name: flag for flag in schema.from_document(extract.flag_document(str(source))).flags
    }

    assert found["--device"].default == "cuda"
    assert found["--lower"].default is True
    assert found["--higher"].default is True


def test_json_classes_and_enums_are_found_at_any_depth(source):
    found = schema.from_document(extract.flag_document(str(source)))

    assert found.classes["OuterConfig"]["inner"].type == "Inner"
    assert found.classes["OuterConfig"]["name"] == schema.Field("name", "str", "nothing")
    assert found.classes["OuterConfig"]["seen"].init is False
    assert found.classes["Inner"]["depth"] == schema.Field("depth", "int", 2, {"ge": 1})
    assert found.enums == {"Mode": {"SLOW": 0, "FAST": 1}}


def test_variables_are_asked_what_they_take(source):
    found = schema.from_document(extract.flag_document(str(source))).environment

    assert found["VLLM_PORT"] == schema.Variable(
        "VLLM_PORT", "int | None", None, form="integer", declared="None"
    )
    assert found["VLLM_FAST"].default is True  # the table's annotation says False
    assert found["VLLM_FAST"].also == ("FAST",)
    assert found["VLLM_LAYOUT"].choices == ("A", "B")
    assert found["VLLM_ON_GPU"].default == schema.Computed("runtime", "False")
    assert found["VLLM_ON_TPU"].default == schema.Computed("runtime", "'no'")


_CONFIG = """

@dataclass(config=ConfigDict(extra="forbid"))
class Checked:
    wide: int = Field(default=1, ge=1, le=8)
    word: Literal["a", "b"] = "a"
    choice: Literal["a", "b", "c", "d"] = "a"
    moved: int = Field(default=1, ge=1)
    lowered: Literal["x"] = "x"
    later: int = Field(default=1, gt=0)

    @field_validator("lowered", mode="before")
    @classmethod
    def lower(cls, value):
        return value.lower()

    @field_validator("later", mode="wrap")
    @classmethod
    def none_passes(cls, value, handler):
        if value is None:
            return value
        return handler(value)

@plain_dataclass
class Unchecked:
    free: int = Field(default=1, ge=1)
"""

_ENGINE = """
    def create_engine_config(self):
        self.shift = 2
        given = self.later
        if given is None:
            self.later = 3
        unchecked = Unchecked(free=self.free)
        if self.headless:
            Checked(lowered=self.name)
        return Checked(
            wide=self.width,
            word=self.backend,
            choice=self.chance,
            moved=self.shift,
            lowered=self.low,
            later=self.later,
        ) if self.secret else None
"""


def test_limits_are_those_of_the_field_that_a_value_reaches_unchanged(source):
    """Not of one that a validator or the engine changes, nor of a class that nothing checks."""
    config, engine = source / "vllm/config/__init__.py", source / "vllm/engine/arg_utils.py"
    imported = "from dataclasses import dataclass as plain_dataclass, field\n"
    text = config.read_text().replace("from dataclasses import field\n", imported)
    config.write_text(
        text.replace("import ConfigDict,", "import field_validator, ConfigDict,") + _CONFIG
    )
    text = engine.read_text().replace(
        "import ModelConfig,", "import Checked, Unchecked, ModelConfig,"
    )
    arguments = "".join(
        f'        parser.add_argument("--{name}", type=int)\n'
        for name in ("shift", "low", "later", "free")
    )
    text = text.replace(
        '        parser.add_argument("--width"', f'{arguments}        parser.add_argument("--width"'
    )
    engine.write_text(text + _ENGINE)

    found = extract.flag_document(str(source))

    assert found["unresolved"] == []
    assert {one["name"]: one["limits"] for one in found["flags"] if "limits" in one} == {
        "--width": {"ge": 1, "le": 8, "class": "Checked", "needs": "secret"},
        "--later": {"gt": 0, "class": "Checked", "needs": "secret"},
    }


def test_classes_of_models_are_found_with_what_they_are_listed_for(source):
    document = extract.flag_document(str(source), models=True)

    assert document["models"] == {
        "BertModel": ["embed"],
        "EarAndMouthForConditionalGeneration": ["generate", "transcribe"],
        "EarForConditionalGeneration": ["transcribe"],
        "LlamaForCausalLM": ["embed", "generate"],
        "OwnForCausalLM": ["generate"],
        "TransformersForCausalLM": ["backend"],
    }
    assert document["unresolved"] == []


def test_a_release_without_lists_of_classes_has_none(source):
    (source / "vllm/model_executor/models/registry.py").unlink()
    assert extract.flag_document(str(source), models=True)["models"] == {}


def test_metrics_are_found_where_they_are_made(source):
    document = extract.flag_document(str(source), metrics=True)

    found = packaged_metrics.from_document(document["metrics"])
    assert {name: metric.type for name, metric in found.items()} == {
        "vllm:tokens_total": "counter",
        "vllm:config_info": "gauge",
        "vllm:load": "gauge",
        "vllm:old_load": "gauge",
    }
    assert [name for name, metric in found.items() if metric.hidden] == ["vllm:old_load"]
    assert [name for name, metric in found.items() if metric.deprecated] == ["vllm:load"]
    assert found["vllm:tokens_total"].help == "Tokens made."


def test_a_release_is_the_same_wherever_it_lies(tmp_path, source, interpreter):
    from_tree = extract.flag_document(str(source))

    assert from_tree["unresolved"] == []
    assert extract.flag_document(str(small_release.sdist(tmp_path))) == from_tree
    assert extract.flag_document(str(small_release.wheel(tmp_path))) == from_tree
    assert extract.flag_document("installed", python=str(interpreter)) == from_tree


def test_no_package_is_imported_even_where_it_is_installed(tmp_path, interpreter):
    """Not vLLM either, whose __init__ raises."""
    document = extract.flag_document("installed", python=str(interpreter))

    assert document["vllm"] == small_release.VERSION
    assert not (tmp_path / "imported").exists()


def test_importing_the_small_release_would_fail(interpreter):
    """Else the test above would prove nothing."""
    done = subprocess.run(
        [str(interpreter), "-c", "import torch, vllm"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "vllm was imported" in done.stderr


def test_help_texts_are_kept_when_they_are_wanted(source):
    assert all("help" not in flag for flag in extract.flag_document(str(source))["flags"])
    found = schema.from_document(extract.flag_document(str(source), helps=True))
    assert found.by_option["--model"].help == "Name of the model."


def test_a_checkout_does_not_say_its_version(source):
    (source / "vllm/_version.py").unlink()

    assert schema.from_document(extract.flag_document(str(source))).version == schema.UNKNOWN


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder, "holds no vllm/engine/arg_utils.py"),
        (lambda folder: folder / "nothing", "does not exist"),
        (lambda folder: _written(folder / "a.txt", b"text"), "neither a directory, nor a wheel"),
        (
            lambda folder: _written(folder / "a.whl", b"PK\5\6" + bytes(18)),
            "it is not a release of vLLM",
        ),
        (lambda folder: _cut(small_release.sdist(folder)), "cannot be read|is no release"),
        (lambda folder: _cut(small_release.wheel(folder)), "neither|cannot be read"),
    ],
    ids=["empty", "missing", "text", "empty wheel", "cut sdist", "cut wheel"],
)
def test_what_is_no_release_is_refused_with_the_reason(tmp_path, make, reason):
    with pytest.raises(FleetError, match=reason):
        extract.flag_document(str(make(tmp_path)))


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _cut(path: Path) -> Path:
    return _written(path, path.read_bytes()[: path.stat().st_size // 2])


def test_what_is_chance_in_the_release_is_the_same_in_every_run(source):
    program = extract.program(str(source)).encode()
    answers = {
        subprocess.run(
            [sys.executable, "-I", "-"], input=program, capture_output=True, check=True
        ).stdout
        for _ in range(4)
    }
    (answer,) = answers
    found = schema.from_document(extract.answer(answer.decode())).by_option
    assert found["--chance"].choices == ("a", "b", "c", "d")


def test_a_python_without_vllm_is_refused():
    with pytest.raises(FleetError, match=r"vllm is not installed beside this Python \(/"):
        extract.flag_document("installed")


def test_a_python_that_does_not_exist_is_refused(source):
    with pytest.raises(FleetError, match="does not exist: give the path of the Python"):
        extract.flag_document(str(source), python="/nonexistent/python3")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("while True: make_arg_parser = None\n", "was not read within 1 s"),
        ("def make_arg_parser(parser):\n  while True:\n   try: pass\n   except: pass\n", "within"),
        ("def make_arg_parser(parser): raise SystemExit(3)\n", "no parser could be read"),
        (
            "def make_arg_parser(parser): return 1 / 0\n",
            "no parser could be read.*division by zero",
        ),
        ("def make_arg_parser(parser)\n", "openai/cli_args.py: this Python cannot parse it"),
        ("", "no parser could be read"),
    ],
    ids=["endless import", "endless call", "exit", "raise", "syntax", "gone"],
)
def test_code_that_misbehaves_ends_in_a_refusal(source, text, reason):
    place = broken(source, "vllm/entrypoints/openai/cli_args.py", text)

    with pytest.raises(FleetError, match=reason):
        extract.flag_document(place, seconds=1 if "while" in text else 30)


def test_the_program_ends_itself_at_its_deadline(source):
    """On a node nobody else may end it, and code of the release may swallow any exception."""
    text = "def make_arg_parser(parser):\n  while True:\n   try: pass\n   except: pass\n"
    place = broken(source, "vllm/entrypoints/openai/cli_args.py", text)

    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=extract.program(place, seconds=1).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"refused": f"{place} was not read within 1 s"}


def test_what_could_not_be_run_is_told(source):
    place = broken(source, "vllm/platforms/__init__.py", "current_platform = 1 / 0\n")
    (source / "vllm/config/extra.py").write_text("LIMIT = 1 / 0\n")
    text = (source / "vllm/config/__init__.py").read_text()
    text = text.replace("names: list[str] | None = None", "names: int = LIMIT")
    (source / "vllm/config/__init__.py").write_text("from vllm.config.extra import LIMIT\n" + text)

    document = extract.flag_document(place)

    (line,) = document["unresolved"]
    assert line == "vllm.config.extra:1 LIMIT: ZeroDivisionError: division by zero"
    read = schema.from_document(document)
    assert read.unresolved == (line,)
    found = {flag.name: flag for flag in read.flags}
    assert found["--names"].default == schema.Computed("runtime", "vllm.config.extra.LIMIT")


def test_an_answer_that_is_none_is_told_with_what_was_said_on_stderr():
    with pytest.raises(FleetError, match="Killed"):
        extract.answer("", "some noise\nKilled\n")
    with pytest.raises(FleetError, match="the program printed no error message"):
        extract.answer("[]")


def test_the_command_prints_a_document_that_the_package_reads(tmp_path):
    done = CliRunner().invoke(flags, ["extract", str(small_release.wheel(tmp_path))])

    assert done.exit_code == 0, done.output
    found = schema.from_document(json.loads(done.stdout))
    assert found.version == small_release.VERSION
    assert f"vLLM {small_release.VERSION}: 14 flags, 5 variables, 0 names not found" in done.stderr


def test_archives_hold_only_what_is_read(tmp_path):
    """A member that climbs out of the archive, or is huge, is not even looked at."""
    path = small_release.wheel(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../vllm/envs.py", "raise")
        archive.writestr("vllm/_C.abi3.so", bytes(10))
    assert extract.flag_document(str(path))["vllm"] == small_release.VERSION

    path = small_release.sdist(tmp_path)
    with tarfile.open(path, "r:gz") as archive:
        names = archive.getnames()
    assert names
    assert extract.flag_document(str(path))["vllm"] == small_release.VERSION
