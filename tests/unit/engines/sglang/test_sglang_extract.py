"""Reading a release of SGLang: whole, and without running what is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.errors import FleetError
from gpufleet.flags import extract, schema
from gpufleet.flags.schema import FlagKind, ValueType
from tests.unit.engines.sglang import small_sglang


def read(source: Path) -> schema.Schema:
    document = extract.flag_document(str(source), engine="sglang")
    assert document["unresolved"] == []
    return schema.from_document(document, "sglang")


def test_everything_that_the_parser_takes_is_found(tmp_path):
    found = read(small_sglang.tree(tmp_path / "source"))

    assert found.version == small_sglang.VERSION
    assert set(found.by_option) == {
        "--model-path", "--port", "--names", "--mode", "--tokens", "--backend", "--gone",
        "--model-type",
    }  # fmt: skip
    by_name = found.by_option
    assert by_name["--model-path"].required
    assert not by_name["--port"].required
    assert by_name["--port"].type == ValueType("int")
    assert by_name["--port"].default == 30000
    assert by_name["--names"].nargs == "+"
    assert by_name["--gone"].kind is FlagKind.SWITCH
    assert by_name["--gone"].deprecated


def test_numbers_are_read_as_sglang_reads_them_and_not_as_vllm_does(tmp_path):
    found = read(small_sglang.tree(tmp_path / "source"))

    assert found.by_option["--tokens"].type == ValueType("si_int")


def test_choices_in_a_set_have_one_order(tmp_path):
    found = read(small_sglang.tree(tmp_path / "source"))

    assert found.by_option["--backend"].choices == ("a", "b", "c")


def test_a_model_in_front_and_underscores_are_as_the_release_reads_them(tmp_path):
    found = read(small_sglang.tree(tmp_path / "source"))

    assert found.syntax == schema.Syntax(underscores=False, leading_model="--model-path")


def test_variables_have_types_and_defaults(tmp_path):
    found = read(small_sglang.tree(tmp_path / "source")).environment

    assert {name: (one.type, one.default) for name, one in found.items()} == {
        "SGLANG_FAST": ("bool", False),
        "SGLANG_SIZE": ("int", 16),
        "SGLANG_NEW": ("bool", True),
        "SGLANG_FOLDER": (None, "/root/cache"),
    }
    assert found["SGLANG_NEW"].also == ("SGLANG_OLD",)


def test_a_wheel_is_read_as_its_tree_is(tmp_path):
    tree = read(small_sglang.tree(tmp_path / "source"))

    assert read(small_sglang.wheel(tmp_path / "sglang.whl")).flags == tree.flags


def test_a_folder_without_sglang_is_refused_by_name(tmp_path):
    with pytest.raises(FleetError, match=r"holds no sglang/srt/server_args\.py: .*SGLang's folder"):
        extract.flag_document(str(tmp_path), engine="sglang")


def test_a_release_whose_parser_cannot_be_built_is_refused_with_its_error(tmp_path):
    source = small_sglang.tree(tmp_path / "source")
    (source / "sglang/srt/server_args.py").write_text(
        "class ServerArgs:\n    def add_cli_args(parser):\n        raise KeyError('port')\n"
    )

    with pytest.raises(FleetError, match=r"no parser could be read from .*KeyError: 'port'"):
        extract.flag_document(str(source), engine="sglang")
