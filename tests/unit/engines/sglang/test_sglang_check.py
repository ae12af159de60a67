"""The verdict on command lines of `sglang serve`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from gpufleet.cli.flags_command import flags
from gpufleet.engines.sglang import sglang_check, sglang_schemas
from gpufleet.flags import command_line, values
from gpufleet.flags.problem import JudgedBy, Kind, Severity

NEWEST = "0.5.23"


def problems(*argv: str, version: str = NEWEST):
    return sglang_check.check(sglang_schemas.load(version), argv)


def only(*argv: str, version: str = NEWEST):
    (found,) = problems(*argv, version=version)
    return found


@pytest.mark.parametrize(
    "argv",
    [
        ("--model-path", "/m", "--port", "30000", "--tp-size", "2", "--nnodes", "2"),
        ("/m", "--tensor-parallel-size", "2"),
        ("--model", "/m", "--enable-metrics", "--device", "cpu"),
        ("--model-path=/m", "--max-total-tokens", "4Ki", "--lora-paths", "a=/a", "b=/b"),
        ("--config", "/etc/sglang.yaml"),
    ],
)
def test_what_the_release_takes_has_no_problem(argv):
    assert problems(*argv) == ()


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("4096", 4096), ("4k", 4000), ("1.5M", 1_500_000), ("2G", 2_000_000_000), ("1T", 10**12),
        ("4Ki", 4096), ("2Mi", 2_097_152), ("1Gi", 1_073_741_824), ("1Ti", 1_099_511_627_776),
    ],
)  # fmt: skip
def test_suffixes_are_powers_of_1000_and_with_an_i_of_1024(written, number):
    schema = sglang_schemas.load(NEWEST)
    line = command_line.parse(schema, ("--model-path=/m", "--max-total-tokens", written))
    given = next(each for each in line.given if each.flag.name == "--max-total-tokens")

    assert values.read(schema, given) == (number, ())


def test_a_model_is_required():
    found = only("--port", "30000")

    assert (found.kind, found.by) == (Kind.MODEL, JudgedBy.PARSER)


def test_a_leading_model_is_refused_by_a_release_that_does_not_take_it():
    kinds = {one.kind for one in problems("/m", version="0.5.10")}

    assert kinds == {Kind.STRAY, Kind.MODEL}


def test_underscores_are_named_with_the_right_spelling():
    found = only("--model-path", "/m", "--tp_size", "2")

    assert (found.kind, found.replacement) == (Kind.UNKNOWN, "--tp-size")
    assert found.rewritten == ("--tp-size", "2")


def test_a_flag_of_vllm_is_unknown_and_its_neighbours_are_named():
    found = only("--model-path", "/m", "--max-model-len", "4096")

    assert (found.kind, found.by) == (Kind.UNKNOWN, JudgedBy.PARSER)
    assert found.rewritten is None


def test_a_flag_of_a_newer_release_is_named_with_that_release():
    found = only("--model-path", "/m", "--attn-dp-size", "2", version="0.5.10")

    assert "was added in SGLang" in found.found


def test_an_abbreviation_is_refused_although_argparse_takes_it():
    found = only("--model-path", "/m", "--enable-metric")

    assert found.kind in {Kind.PREFIX, Kind.AMBIGUOUS}
    assert found.refuses
    assert only("--model-path", "/m", "--context-len=4").rewritten == ("--context-length", "4")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--port", "x"), ("--mem-fraction-static", "much"), ("--max-total-tokens", "4K")],
)
def test_a_value_of_another_type_is_refused_by_the_parser(flag, value):
    found = only("--model-path", "/m", flag, value)

    assert (found.kind, found.by) == (Kind.VALUE, JudgedBy.PARSER)


def test_a_value_outside_the_choices_is_refused_by_the_parser():
    found = only("--model-path", "/m", "--attention-backend", "fastest")

    assert (found.kind, found.by) == (Kind.CHOICE, JudgedBy.PARSER)


def test_a_config_file_behind_an_equals_sign_is_never_read():
    found = problems("--model-path", "/m", "--config=/etc/sglang.yaml")

    assert [(one.kind, one.by) for one in found] == [(Kind.FORM, JudgedBy.ADVICE)]


def test_a_deprecated_flag_is_a_remark():
    found = only("--model-path", "/m", "--disable-cuda-graph")

    assert (found.kind, found.severity) == (Kind.DEPRECATED, Severity.WARN)


def test_a_repeated_value_is_a_remark():
    found = only("--model-path", "/m", "--port", "1", "--port", "2")

    assert (found.kind, found.severity) == (Kind.REPEATED, Severity.WARN)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(flags, ["check", *arguments], standalone_mode=False)
    if done.exception is not None:
        return 2, str(getattr(done.exception, "message", done.exception))
    return int(done.return_value), done.output


def test_the_command_judges_a_line_of_sglangs_by_its_release() -> None:
    line = ("sglang", "serve", "--model-path", "m")
    assert run("--sglang", NEWEST, "--", *line, "--tp-size", "4") == (
        0,
        "accepted by SGLang 0.5.23\n",
    )

    status, said = run("--sglang", NEWEST, "--", "python3", "-m", "sglang.launch_server", "--tp=x")
    assert status == 1
    assert said.endswith("refused: 2 problems with SGLang 0.5.23\n")

    told = json.loads(run("--sglang", NEWEST, "--json", "--", *line)[1])
    assert (told["sglang"], told["accepted"]) == (NEWEST, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--", "/opt/bin/sglang", "serve", "--tp", "2"),
            "give the release, for example --sglang 0.",
        ),
        (("--sglang", NEWEST, "--vllm", "0.32.0", "--", "--tp", "2"), "remove them, or"),
        (("--sglang", NEWEST, "--env", "A=1", "--", "--tp", "2"), "remove them, or"),
        (("--sglang", "9.9", "--", "--tp", "2"), "SGLang 9.9: unknown release"),
    ],
)
def test_a_line_without_its_release_is_refused(words: tuple[str, ...], said: str) -> None:
    status, found = run(*words)
    assert (status, said in found) == (2, True), found
