"""Every name that guides to vLLM use is explained, and what a page says is what the release has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpufleet.cli.flags_command import flags
from gpufleet.errors import FleetError
from gpufleet.flags import changes, history, schema
from gpufleet.flags.changes import ABSENT, ChangeKind
from gpufleet.flags.explain import _type, entries, explain_flag, explanation_page
from gpufleet.flags.schema import Variable
from tests.support.rows import each_row

# The 202 flags and 41 variables that five public guides to vLLM name, made up ones included.
GUIDE_NAMES = (Path(__file__).parent / "guide-names.txt").read_text().split()
VERSIONS = schema.versions()
NEWEST = schema.load(VERSIONS[-1])
ALL = {version: schema.load(version) for version in VERSIONS}

# Variables that libraries under vLLM read, and not vLLM.
OF_LIBRARIES = {"HF_TOKEN", "OMP_NUM_THREADS", "NCCL_DEBUG"}


def _ever(name: str) -> bool:
    if name.startswith("-"):
        return any(release.flag(name) for release in ALL.values())
    return any(name in release.environment for release in ALL.values())


def test_the_list_of_names_is_whole() -> None:
    assert len(GUIDE_NAMES) == len(set(GUIDE_NAMES)) == 243
    assert sum(name.startswith("--") for name in GUIDE_NAMES) == 202


def test_every_name_of_the_guides_has_an_entry_and_no_entry_is_about_nothing() -> None:
    assert set(GUIDE_NAMES) <= set(entries())
    for name in entries():
        assert _ever(name) or name in OF_LIBRARIES or changes.changes_of(name), name


@each_row("name", sorted(entries()))
def test_an_entry_is_two_to_six_whole_sentences(name: str) -> None:
    """Short enough to be read at night, and never only a name in other words."""
    entry = entries()[name]
    parts = [part for part in (entry.does, entry.use, entry.cost) if part]
    for part in parts:
        assert re.match(r"[A-Z0-9`]|--|gpufleet\b", part), part
        assert part.endswith("."), part
    sentences = re.findall(r"[.!?](?= [A-Z`0-9\[]|$)", " ".join(parts))
    assert 2 <= len(sentences) <= 6


@each_row("name", sorted(entries()))
def test_what_an_entry_points_to_exists(name: str) -> None:
    entry = entries()[name]
    assert name not in entry.related
    for other in entry.related:
        assert other in entries() or _ever(other), other
    text = " ".join(filter(None, (entry.does, entry.use, entry.cost)))
    # `--no-KEY` is how vLLM's own documentation writes any negation.
    for other in re.findall(r"(?<![\w-])--[A-Za-z][\w-]*\w", text.replace("`--no-KEY`", "")):
        assert _ever(other) or changes.changes_of(other), other


@each_row("name", sorted(entries()))
def test_an_entry_gives_no_default_of_its_own(name: str) -> None:
    """Defaults differ by release: only the schemas know them."""
    entry = entries()[name]
    text = " ".join(filter(None, (entry.does, entry.use, entry.cost)))
    assert not re.search(r"default(s| is| of| to|:) +`?[\d\[\"]", text, re.IGNORECASE)


@each_row("name", GUIDE_NAMES)
def test_a_name_that_the_newest_release_lacks_is_accounted_for(name: str) -> None:
    """Since when it is gone and what to do instead, or that it never was there."""
    found = explain_flag(name)
    if found.there or name in OF_LIBRARIES:
        return
    base = name.replace("--no-", "--", 1)
    gone = found.removal_reason or changes.removal_reason(base, NEWEST.version)
    assert gone
    assert (gone.kind is ChangeKind.NEVER) == (not _ever(name))
    assert gone.replacement or gone.rewrite is not None or gone.kind is ChangeKind.NEVER


@each_row("name", [n for n in GUIDE_NAMES if n not in OF_LIBRARIES])
def test_history_is_what_the_schemas_say(name: str) -> None:
    """`history` reads around in the texts; loading everything has to give the same."""
    if name.startswith("-"):
        assert history.flag_history(name) == {v: ALL[v].flag(name) for v in VERSIONS}
    else:
        assert history.variable_history(name) == {v: ALL[v].environment.get(name) for v in VERSIONS}


def test_defaults_are_told_by_release() -> None:
    found = explain_flag("--gpu-memory-utilization")
    assert [(span.first, span.last, span.value) for span in found.defaults] == [
        ("0.4.2", "0.19.1", 0.9),
        ("0.20.0", VERSIONS[-1], 0.92),
    ]
    assert "0.9 (0.4.2 to 0.19.1); 0.92 (0.20.0 to" in explanation_page(found, 100)


def test_a_flag_that_came_back_has_two_runs() -> None:
    assert [str(span) for span in explain_flag("--disable-log-requests").accepted] == [
        "0.4.2 to 0.16.0",
        VERSIONS[-1],
    ]


@each_row(
    ("asked", "name"),
    [
        ("max_model_len", "--max-model-len"),
        ("--max_model_len", "--max-model-len"),
        ("-tp", "--tensor-parallel-size"),
        ("--speculative-config.model", "--speculative-config"),
        ("--CUDA-graph-sizes", "--CUDA-graph-sizes"),
        ("--enable-lora=true", "--enable-lora"),
    ],
)
def test_a_name_may_be_written_in_other_ways(asked: str, name: str) -> None:
    assert explain_flag(asked).name == name


def test_a_negation_says_of_what() -> None:
    found = explain_flag("--no-enable-lora")
    assert (found.base, found.negation) == ("--enable-lora", True)
    assert "not in vLLM's help" in explanation_page(found, 200)
    assert "not in vLLM's help" not in explanation_page(
        explain_flag("--no-enable-lora", ALL["0.32.0"]), 200
    )


def test_another_name_has_the_words_of_its_flag() -> None:
    found = explain_flag("--device-memory-utilization")
    assert (found.base, found.negation) == ("--gpu-memory-utilization", False)
    assert found.entry is entries()["--gpu-memory-utilization"]


def test_a_page_is_about_the_release_that_is_asked_for() -> None:
    assert explain_flag("--swap-space", ALL["0.17.0"]).there
    assert "refuses it" in explanation_page(explain_flag("--swap-space", ALL["0.18.0"]), 100)
    assert "ignores it" in explanation_page(explain_flag("VLLM_USE_V1"), 100)
    old = explanation_page(explain_flag("--kv-cache-dtype", ALL["0.8.5"]), 100)
    assert "nvfp4" not in old
    assert "nvfp4" in explanation_page(explain_flag("--kv-cache-dtype"), 100)


def test_a_variable_of_a_library_is_not_called_unknown() -> None:
    assert "a library that vLLM uses reads" in explanation_page(explain_flag("HF_TOKEN"), 100)


def test_a_flag_without_words_of_ours_shows_what_the_releases_have() -> None:
    assert "--kv-offloading-size" not in entries()
    text = explanation_page(explain_flag("--kv-offloading-size"), 100)
    assert "no explanation of this name yet" in text
    assert "0.11.1 to" in text


def test_no_line_is_wider_than_the_terminal() -> None:
    for name in GUIDE_NAMES:
        assert max(map(len, explanation_page(explain_flag(name), 80).splitlines())) <= 80, name


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(FleetError, match="did you mean --max-model-len"):
        explain_flag("--max-modle-len")


def test_a_word_lists_what_is_about_it() -> None:
    """By names; a word that no name has, by what the explanations say."""
    result = CliRunner().invoke(flags, ["explain", "lora", "--vllm", "0.32.0"])
    assert result.exit_code == 0
    for name in ("--enable-lora", "--max-lora-rank", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        assert name in result.output
    assert max(map(len, result.output.splitlines())) <= 80

    for word, name in (
        ("expert parallel", "--enable-expert-parallel"),
        ("pages", "--num-gpu-blocks-override"),
    ):
        result = CliRunner().invoke(flags, ["explain", word, "--vllm", "0.32.0", "--json"])
        assert name in json.loads(result.output)
    assert CliRunner().invoke(flags, ["explain", "zebra"]).exit_code != 0
    assert CliRunner().invoke(flags, ["explain", "--lora"]).exit_code != 0


def test_the_command_takes_flags_as_they_are_written() -> None:
    for asked in ("--max-model-len", "-tp", "--no-enable-lora", "VLLM_PORT"):
        result = CliRunner().invoke(flags, ["explain", asked, "--vllm", "0.32.0"])
        assert result.exit_code == 0, result.output
        assert "vLLM 0.32.0" in result.output


def test_json_has_what_the_page_says() -> None:
    result = CliRunner().invoke(flags, ["explain", "--kv-cache-dtype", "--json"])
    told = json.loads(result.output)
    assert told["accepted"]
    assert told["default"] == "auto"
    assert "nvfp4" in told["values"]
    assert told["accepted_in"] == [{"first": "0.4.2", "last": VERSIONS[-1]}]
    assert {change["kind"] for change in told["changes"]} == {"value"}


def test_an_unknown_release_is_refused() -> None:
    result = CliRunner().invoke(flags, ["explain", "--seed", "--vllm", "9.9.9"])
    assert isinstance(result.exception, FleetError)


def test_kinds_that_mean_absent_are_all_told_as_such() -> None:
    assert {kind.value for kind in ABSENT} == {"never", "removed", "renamed"}


@pytest.mark.parametrize(
    ("type_", "printed"),
    [
        ("Optional[str]", "str"),
        ("Literal['a', 'b']", "Literal['a', 'b']"),
        ("Optional[Literal['a']]", "Literal['a']"),
        (None, "text"),
    ],
)
def test_a_variables_type_keeps_its_own_brackets(type_: str | None, printed: str) -> None:
    there = Variable("VLLM_X", type_, None)
    assert _type(there) == printed


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("--enable-log-requests", "a switch that can be negated"),
        ("--aggregate-engine-logging", "a switch"),
        ("--middleware", "text, and the flag may be given several times"),
        ("--served-model-name", "text, several values"),
        ("--max-num-seqs", "whole number"),
        ("--gpu-memory-utilization", "number"),
        ("--compilation-config", "JSON (CompilationConfig)"),
        ("--host", "text"),
    ],
)
def test_a_flags_type_says_how_it_is_given(name: str, printed: str) -> None:
    flag = NEWEST.flag(name)
    assert flag is not None
    assert _type(flag) == printed
