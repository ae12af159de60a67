"""`flags check` says what the release's own parser says, and why; and what the parser cannot say.

The verdicts of the real parser are recorded (`record_verdicts.py`); the lab asks it again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpufleet.cli.flags_command import flags
from gpufleet.errors import FleetError
from gpufleet.flags import json_keys, schema
from gpufleet.flags.check import Verdict, check, check_command_line
from gpufleet.flags.conflicts import RULES
from gpufleet.flags.problem import JudgedBy, Kind, Problem, Severity
from tests.support.rows import each_row
from tests.unit.flags import lines, record_verdicts

RECORDED = record_verdicts.load("0.32.0")


def verdict(version: str, line: str | Sequence[str], **variables: str) -> Verdict:
    words = line.split() if isinstance(line, str) else line
    return check_command_line(schema.load(version), words, variables)


def refused(version: str, line: str | Sequence[str], **variables: str) -> Problem:
    """Return the one problem that refuses a command line; more or none fails the test."""
    found = [each for each in verdict(version, line, **variables).problems if each.refuses]
    assert len(found) == 1, found
    return found[0]


def warned(version: str, line: str | Sequence[str], **variables: str) -> Problem:
    """Return the one remark on a command line that is accepted."""
    found = verdict(version, line, **variables).problems
    assert [each.severity for each in found] == [Severity.WARN], found
    return found[0]


# -- the real parser -------------------------------------------------------------------------------


def test_verdict_is_the_parsers() -> None:
    """Of 9000 command lines the parser of 0.32.0 takes exactly those that we say it takes."""
    known = schema.load(RECORDED.vllm)
    differing = [
        (line, accepted)
        for line, accepted in RECORDED.verdicts
        if any(problem.by is JudgedBy.PARSER for problem in check(known, line)) is accepted
    ]
    assert differing == []
    assert len(RECORDED.verdicts) > 5000
    assert len(lines.written()) > 200


def test_recorded_lines_use_every_flag() -> None:
    """Each flag of 0.32.0 is in lines that its parser takes and in lines that it refuses."""
    verdicts: dict[str, set[bool]] = {}
    for line, accepted in RECORDED.verdicts:
        for word in line:
            verdicts.setdefault(word.partition("=")[0], set()).add(accepted)
    for flag in schema.load(RECORDED.vllm).flags:
        if not flag.positional and flag.name != "--config":  # its file would have to be there
            assert verdicts[flag.name] == {True, False}, flag.name


def test_every_public_line_was_recorded() -> None:
    """A command line that is added to the collection is recorded, too."""
    recorded = {line for line, _ in RECORDED.verdicts}
    assert [line for line in lines.written() if tuple(line) not in recorded] == []


def test_only_beginnings_of_names_are_taken_and_refused() -> None:
    """What the parser takes and we refuse without a rule of vLLM's start is a shortened name."""
    known = schema.load(RECORDED.vllm)
    ours = {Kind.PREFIX, Kind.NEVER, Kind.REMOVED, Kind.RENAMED, Kind.MODEL}
    for line, accepted in RECORDED.verdicts:
        if accepted:
            kinds = {p.kind for p in check(known, line) if p.refuses and p.by is JudgedBy.ADVICE}
            assert kinds <= ours, line


def test_every_release_is_judged() -> None:
    """No command line of people breaks the check of any release, whatever it takes."""
    for version in schema.versions():
        known = schema.load(version)
        for line in lines.written()[::5]:
            check(known, line, {"VLLM_USE_V1": "1"})


# -- names -----------------------------------------------------------------------------------------


@each_row(
    ("version", "line", "kind", "since", "rewritten"),
    [
        ("0.33.0", "M --swap-space 4", Kind.REMOVED, "0.18.0", ()),
        ("0.33.0", "M --swap_space=4", Kind.REMOVED, "0.18.0", ()),
        ("0.33.0", "M --worker-use-ray", Kind.RENAMED, "0.7.0",
         ("--distributed-executor-backend", "ray")),
        ("0.33.0", "M --reasoning-effort high", Kind.NEVER, None, None),
        ("0.33.0", "M --device cuda", Kind.REMOVED, "0.10.0", ()),
        ("0.33.0", "M --gpu-memory-util 0.9", Kind.PREFIX, None,
         ("--gpu-memory-utilization", "0.9")),
        ("0.33.0", "M --enable-prefix", Kind.PREFIX, None, ("--enable-prefix-caching",)),
        ("0.33.0", "M --data-parallel 2", Kind.AMBIGUOUS, None, None),
        ("0.33.0", "M --gpu-memory-utilisation 0.9", Kind.UNKNOWN, None, None),
        ("0.33.0", "M --Max-Model-Len 4096", Kind.UNKNOWN, None, ("--max-model-len", "4096")),
        ("0.20.2", "M --max-num-queued-reqs 5", Kind.UNKNOWN, None, None),
    ],
)  # fmt: skip
def test_name_that_is_none(
    version: str, line: str, kind: Kind, since: str | None, rewritten: tuple[str, ...] | None
) -> None:
    """A name that a release does not have is refused, and what became of it is said."""
    problem = refused(version, line)
    assert (problem.kind, problem.since, problem.rewritten) == (kind, since, rewritten)
    assert problem.argument == " ".join(line.split()[1:])


def test_near_names_are_named() -> None:
    """A mistyped name is answered with the right one."""
    problem = refused("0.33.0", "M --gpu-memory-utilisation 0.9")
    assert "--gpu-memory-utilization" in str(problem.replacement)


def test_name_that_comes_later_says_when() -> None:
    """A flag of a newer release is no mistyped one."""
    assert "0.29.0" in refused("0.20.2", "M --max-num-queued-reqs 5").found


def test_a_name_that_only_a_release_between_lacks_was_not_added_later() -> None:
    """A build of one's own between two releases may have renamed it."""
    known = schema.load("0.32.0")
    flags = tuple(flag for flag in known.flags if flag.name != "--enforce-eager")
    between = replace(known, version="0.32.6", flags=flags)
    found = check_command_line(between, ["M", "--enforce-eager"], {}).problems
    assert [each.found for each in found if each.refuses] == [
        "vLLM 0.32.0 and 0.33.0 have `--enforce-eager`, but vLLM 0.32.6 does not have this flag"
    ]


def test_removed_name_is_not_removed_where_it_was() -> None:
    """What 0.33.0 lacks 0.16.0 may have had."""
    assert verdict("0.16.0", "M --swap-space 4").accepted


def test_prefix_says_what_argparse_makes_of_it() -> None:
    """Where argparse would take another flag, that flag is named."""
    assert "--reasoning-effort-map" in refused("0.33.0", "M --reasoning-effort high").found


def test_prefix_with_a_wrong_value_is_the_parsers_refusal() -> None:
    """A beginning is taken by argparse only with a value that fits the whole name."""
    assert refused("0.33.0", "M --gpu-memory-util 0.9").by is JudgedBy.ADVICE
    assert refused("0.33.0", "M --gpu-memory-util much").by is JudgedBy.PARSER


@each_row(
    ("version", "line", "rewritten"),
    [
        ("0.32.0", "M --disable-prefix-caching", ("--no-enable-prefix-caching",)),
        ("0.32.0", "M --enable-custom-all-reduce", ("--no-disable-custom-all-reduce",)),
        ("0.9.1", "M --no-disable-log-stats", ()),
        ("0.33.0", "M --enforce-eager=true", ("--enforce-eager",)),
        ("0.33.0", "M --enforce-eager=False", ("--no-enforce-eager",)),
        ("0.33.0", "M --enforce-eager True", ("--enforce-eager",)),
        ("0.33.0", "M --enable-prefix-caching false", ("--no-enable-prefix-caching",)),
        ("0.33.0", "M --headless=false", ()),
    ],
)
def test_switch_in_another_form(version: str, line: str, rewritten: tuple[str, ...]) -> None:
    """A switch that is written as another release writes it is rewritten for this one."""
    problem = refused(version, line)
    assert (problem.kind, problem.rewritten) == (Kind.FORM, rewritten)


def test_disable_form_is_of_its_release() -> None:
    """--disable-x for --enable-x came with 0.33.0; --no-enable-x is true before and after."""
    assert verdict("0.33.0", "M --disable-prefix-caching").accepted
    assert not verdict("0.32.0", "M --disable-prefix-caching").accepted
    assert verdict("0.32.0", "M --no-enable-prefix-caching").problems == ()
    assert verdict("0.33.0", "M --no-enable-prefix-caching").accepted


# -- values ----------------------------------------------------------------------------------------


@each_row(
    ("version", "line", "kind", "rewritten"),
    [
        ("0.33.0", "M --max-model-len 32,768", Kind.VALUE, None),
        ("0.33.0", "M --max-model-len 1.5K", Kind.VALUE, None),
        ("0.8.3", "M --max-model-len 32k", Kind.VALUE, ("--max-model-len", "32000")),
        ("0.12.0", "M --max-model-len auto", Kind.VALUE, None),
        ("0.33.0", "M --max-num-seqs 1k", Kind.VALUE, ("--max-num-seqs", "1000")),
        ("0.33.0", "M --dtype fp16", Kind.CHOICE, None),
        ("0.33.0", "M --log-level debug", Kind.CHOICE, ("--log-level", "DEBUG")),
        ("0.33.0", "M --prefix-caching-hash-algo builtin", Kind.CHOICE,
         ("--prefix-caching-hash-algo", "sha256")),
        ("0.33.0", "M --port", Kind.VALUE, None),
        ("0.33.0", "M --limit-mm-per-prompt image=4,video=1", Kind.JSON,
         ("--limit-mm-per-prompt", '{"image": 4, "video": 1}')),
        ("0.33.0", ["M", "--allowed-origins", "['*']"], Kind.JSON, ("--allowed-origins", '["*"]')),
        ("0.33.0", "M stray", Kind.STRAY, None),
        ("0.33.0", "M --help", Kind.HELP, ()),
    ],
)  # fmt: skip
def test_value_that_is_none(
    version: str, line: str | list[str], kind: Kind, rewritten: tuple[str, ...] | None
) -> None:
    """A value that the release's parser does not read is refused as the parser's."""
    problem = refused(version, line)
    assert (problem.kind, problem.rewritten, problem.by) == (kind, rewritten, JudgedBy.PARSER)


def test_suffixes_are_of_their_release() -> None:
    """K, M and auto are read from the releases on that read them."""
    assert verdict("0.8.5", "M --max-model-len 32k").accepted
    assert verdict("0.14.0", "M --max-model-len auto").accepted


@each_row(
    ("value", "words"),
    [
        ('{"kv_connector": "X", "kv_roll": "kv_both"}', ["kv_roll", "kv_role"]),
        ('{"kv_connector": "X", "kv_role": "both"}', ["kv_role", "kv_producer"]),
        ('{"kv_connector": "X"}', ["kv_connector", "kv_role"]),
        ('{"kv_port": "high"}', ["kv_port", "whole number"]),
        ('{"kv_connector_extra_config": 3}', ["kv_connector_extra_config", "object"]),
        ("[]", ["JSON object"]),
        ('{"kv_port": 1', ["not JSON"]),
    ],
)
def test_json_that_does_not_fit(value: str, words: list[str]) -> None:
    """Each member of a JSON config is judged, and the sentence names it."""
    problem = refused("0.33.0", ["M", "--kv-transfer-config", value])
    assert problem.kind is Kind.JSON
    assert all(word in problem.found for word in words), problem.found


def test_dotted_form_is_the_same_json() -> None:
    """--x.key value is judged as the JSON that vLLM makes of it."""
    assert refused("0.33.0", "M -cc.mode 7 -tp 2").argument == "-cc.mode 7"
    two = verdict("0.33.0", "M --kv-transfer-config.kv_role both --kv-transfer-config.kv_port x")
    assert [each.kind for each in two.problems] == [Kind.JSON, Kind.JSON]


def test_dotted_form_is_of_its_release() -> None:
    """A release that takes JSON in one piece only is not said to lack the flag."""
    problem = refused("0.8.5", "M --limit-mm-per-prompt.image 4")
    assert (problem.kind, "whole JSON" in problem.found) == (Kind.FORM, True)


def test_pairs_are_of_their_releases() -> None:
    """image=4 was read beside JSON from 0.8.5 on, and no longer is since 0.10.0."""
    line = ["M", "--limit-mm-per-prompt"]
    assert verdict("0.9.1", [*line, "image=4"]).accepted
    assert verdict("0.9.1", [*line, '{"image": 4}']).accepted
    assert not verdict("0.10.0", [*line, "image=4"]).accepted
    assert not verdict("0.8.3", [*line, '{"image": 4}']).accepted


def test_level_of_old_guides() -> None:
    """-O with JSON was --compilation-config until 0.12.0, and is nothing today."""
    line = ["M", "-O", '{"level": 3}']
    assert verdict("0.11.0", line).accepted
    problem = refused("0.33.0", line)
    assert (problem.since, problem.rewritten) == ("0.12.0", ("-cc", '{"level": 3}'))
    assert verdict("0.33.0", "M -O3").problems == ()


# -- what no parser sees ---------------------------------------------------------------------------


@each_row(
    ("line", "word"),
    [
        ("M --headless --api-server-count 2", "--api-server-count"),
        ("M -tp 8 --nnodes 3", "a multiple of `--nnodes`"),
        ("M -tp 8 --nnodes 2 --node-rank 2", "--node-rank"),
        ("M -dp 4 --data-parallel-external-lb", "--data-parallel-rank"),
        ("M -dp 4 --data-parallel-rank 4", "--data-parallel-rank"),
        ("M -dp 4 --data-parallel-rank 1 --data-parallel-size-local 2", "must be 1"),
        ("M -dp 2 -dpl 4", "--data-parallel-size-local"),
        ("M -dp 4 -dph", "--data-parallel-size-local"),
        ("M -tp 8 --enable-eplb", "--enable-expert-parallel"),
        ("M --enable-auto-tool-choice", "--tool-call-parser"),
        ("M --lora-modules a=/b", "--enable-lora"),
        ("M --max-num-seqs 512 --max-num-batched-tokens 256", "--max-num-seqs"),
        ("M --gpu-memory-utilization 90", "at most 1, because it is a share between 0 and 1"),
        ("M -tp 0", "at least 1"),
        ("M --quantization int9", "int9"),
        ("M --reasoning-parser deepseek", "deepseek_r1"),
        ("M --kv-cache-dtype fp8 --tool-call-parser qwen --enable-auto-tool-choice", "parser"),
        ('M --speculative-config {"method":"eagle9"}', "method"),
        ('M --speculative-config {"num_tokens":3}', "num_tokens"),
        ("M -pp 2 --distributed-executor-backend uni", "mp or ray"),
    ],
)
def test_what_ends_the_start_is_refused(line: str, word: str) -> None:
    """What the parser takes and vLLM's start refuses is refused, and not in the parser's name."""
    problem = refused("0.33.0", line)
    assert problem.by is JudgedBy.START
    assert word in problem.found
    assert verdict("0.33.0", line).parser_accepts


@each_row(
    "line",
    [
        "M -tp 8 -pp 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless",
        "M -dp 4 -dpl 2 -dpa 10.0.0.1 -dpp 13345 --headless --data-parallel-start-rank 2",
        "M -dp 4 -dpl 2 -dph --data-parallel-start-rank 2",
        "M -dp 4 --data-parallel-rank 3 --data-parallel-external-lb",
        "M -dp 8 -dpl 4 --data-parallel-multi-port-external-lb",
        "M -tp 8 -ep --enable-eplb --eplb-config.num_redundant_experts 32",
        "M --enable-auto-tool-choice --tool-call-parser mine --tool-parser-plugin /p.py",
        "M --async-scheduling --spec-method mtp --spec-tokens 2",
        "M --enable-lora --lora-modules a=/b --max-loras 2 --max-cpu-loras 4",
        "M -tp 4 -dcp 2",
    ],
)
def test_what_belongs_together_is_accepted(line: str) -> None:
    """The documented ways of serving on several GPUs and nodes raise no alarm."""
    assert verdict("0.33.0", line).problems == ()


def test_conflicts_name_flags_of_some_release() -> None:
    """A rule that no release could break, because a name is mistyped, is no rule."""
    names = {option for each in schema.versions() for option in schema.load(each).by_option}
    for rule in RULES:
        assert set(rule.flags) <= names, rule.flags
        assert rule.since in schema.versions(), rule
        assert rule.until is None or rule.until in schema.versions(), rule


def test_meaning_that_changed() -> None:
    """fp8 on a checkpoint that is not quantized is another thing since 0.31.0."""
    assert warned("0.33.0", "M --quantization fp8").kind is Kind.MEANING
    assert verdict("0.30.0", "M --quantization fp8").problems == ()


def test_what_is_true_of_every_value_is_no_remark() -> None:
    """The share of memory means something else since 0.20.0: that is for `flags diff` to say."""
    assert verdict("0.33.0", "M --gpu-memory-utilization 0.9").problems == ()
    # What is to be left out stays a remark.
    assert warned("0.10.0", "M --num-scheduler-steps 4").kind is Kind.MEANING


@each_row(
    ("version", "json_flag", "value", "since", "replacement"),
    [
        ("0.33.0", "-cc", '{"level": 3}', "0.18.0", "`mode`, which has the same numbers"),
        ("0.33.0", "-cc", '{"full_cuda_graph": true}', "0.11.1", '`cudagraph_mode`: "FULL"'),
        ("0.33.0", "-cc", '{"full-cuda-graph": true}', "0.11.1", '`cudagraph_mode`: "FULL"'),
        ("0.33.0", "-cc", '{"pass_config": {"enable_noop": true}}', "0.13.0", "`eliminate_noops`"),
        ("0.33.0", "--kv-transfer-config", '{"kv_rank": 0}', "0.32.0", None),
        (
            "0.33.0",
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 2, "disable_logprobs": true}',
            "0.11.1",
            None,
        ),
        # No release had it, or only later ones do.
        ("0.33.0", "-cc", '{"levels": 3}', None, None),
        ("0.11.0", "-cc", '{"mode": 3}', None, None),
    ],
)
def test_a_json_key_that_is_gone_says_since_when_and_what_replaces_it(
    version: str, json_flag: str, value: str, since: str | None, replacement: str | None
) -> None:
    problem = refused(version, ["M", json_flag, value])
    assert (problem.since, problem.replacement) == (since, replacement)
    assert ("was removed" in problem.found) is (since is not None)


def test_what_replaces_a_json_key_is_in_the_release_that_lost_it() -> None:
    for json_class, key, text in json_keys.replacements():
        was = json_keys.removal_of(json_class, key, "0.33.0")
        assert was is not None, key
        assert was.replacement == text
        fields = schema.load(was.since).classes[json_class] or {}
        named = re.findall("`([a-z_]+)`", text)
        assert named
        assert set(named) <= fields.keys(), (key, was)


@each_row(
    ("line", "words"),
    [
        ("M --max-model-len 0", "at least 1"),
        ("M --block-size 0", "more than 0"),
        ("M --watermark 1", "less than 1"),
        ("M --max-num-queued-reqs -1", "at least 0"),
        ("M --kv-cache-metrics-sample 2", "at most 1"),
        ("M --max-num-scheduled-tokens 0", "at least 1"),
        ("M --data-parallel-backend nope", "choose from ray, mp"),
        ('M --speculative-config {"method":"ngram"}', "needs `num_speculative_tokens`"),
        ("M --spec-method ngram", "needs `num_speculative_tokens`"),
        ("M --additional-config [1]", "is not a JSON object"),
        ("M -tp 2 --nnodes 2 --distributed-executor-backend ray", "Ray chooses the nodes"),
    ],
)
def test_what_the_start_refuses_before_a_model_is_loaded(line: str, words: str) -> None:
    problem = refused("0.32.0", line)
    assert words in problem.found
    assert problem.by is JudgedBy.START


@each_row(
    ("version", "line"),
    [
        ("0.26.0", "M --max-model-len 0"),
        ("0.26.0", "M --max-num-partial-prefills 2"),
        ("0.11.1", "M --max-long-partial-prefills 2"),
        ("0.23.0", "M --block-size 0"),
        ("0.23.0", "M -tp 0"),
        ("0.11.1", "M --max-num-seqs 0"),
        ("0.11.1", "M --data-parallel-backend nope"),
        ("0.11.1", "M --mamba-block-size 0"),
        ("0.14.0", "M --kv-cache-metrics-sample 0"),
        ("0.11.1", 'M --speculative-config {"method":"ngram"}'),
        ("0.11.1", "M --additional-config [1]"),
        ("0.11.1", "M -tp 2 --nnodes 2 --distributed-executor-backend ray"),
    ],
)
def test_older_releases_refuse_it_from_the_first_that_was_read(version: str, line: str) -> None:
    assert refused(version, line).by is JudgedBy.START


@each_row(
    ("version", "line"),
    [
        ("0.32.0", "M --max-model-len -1"),
        ("0.32.0", "M --max-model-len auto"),
        ("0.32.0", "M --block-size 16 --watermark 0 --max-num-queued-reqs 0"),
        ("0.31.0", "M --max-num-scheduled-tokens 0"),
        # Releases before had no such rule.
        ("0.22.1", "M --block-size 0"),
        ("0.11.0", "M --max-num-seqs 0"),
        ("0.11.0", "M --max-num-partial-prefills 2"),
        ("0.26.0", "M --max-num-partial-prefills 1"),
        ("0.27.0", "M --max-num-seqs 2"),
        ("0.20.0", "M --long-prefill-token-threshold -1"),
        ("0.32.0", "M --data-parallel-backend ray -dp 2"),
        ("0.32.0", 'M --speculative-config {"method":"ngram"} --spec-tokens 3'),
        ("0.32.0", 'M --speculative-config {"method":"suffix"}'),
        ("0.32.0", 'M --additional-config {"a":1}'),
        ("0.32.0", "M -tp 2 --nnodes 2 --distributed-executor-backend mp"),
        ("0.32.0", "M -tp 2 --distributed-executor-backend ray"),
    ],
)
def test_what_the_start_takes_is_accepted(version: str, line: str) -> None:
    found = verdict(version, line)
    assert found.accepted, found.problems


# Limits as people read them in vllm/config/*.py: the flag, its bounds, and the releases.
READ_BY_HAND = [
    ("--block-size", {"gt": 0}, "0.23.0", "0.33.0"),
    ("--mamba-block-size", {"gt": 0}, "0.11.1", "0.33.0"),
    ("--prefix-cache-retention-interval", {"ge": 0}, "0.30.0", "0.33.0"),
    ("--prefix-match-unit", {"gt": 0}, "0.26.0", "0.33.0"),
    ("--replayssm-buffer-len", {"gt": 0}, "0.27.0", "0.33.0"),
    ("--max-lora-cls-labels", {"ge": 1}, "0.31.0", "0.33.0"),
    ("--kv-cache-metrics-sample", {"gt": 0, "le": 1}, "0.12.0", "0.33.0"),
    ("--long-prefill-token-threshold", {"ge": 0}, "0.25.0", "0.33.0"),
    ("--max-long-partial-prefills", {"ge": 1}, "0.11.1", "0.26.0"),
    ("--max-num-partial-prefills", {"ge": 1}, "0.11.1", "0.26.0"),
    ("--max-num-active-seqs", {"ge": 1}, "0.31.0", "0.33.0"),
    ("--max-num-queued-reqs", {"ge": 0}, "0.29.0", "0.33.0"),
    ("--max-num-scheduled-tokens", {"ge": 0}, "0.26.0", "0.31.0"),
    ("--max-num-scheduled-tokens", {"ge": 1}, "0.32.0", "0.33.0"),
    ("--prefill-schedule-interval", {"ge": 1}, "0.24.0", "0.33.0"),
    ("--watermark", {"ge": 0, "lt": 1}, "0.24.0", "0.33.0"),
]


@each_row(("name", "bounds", "first", "last"), READ_BY_HAND)
def test_the_extractor_finds_the_limits_that_people_read(
    name: str, bounds: dict[str, float], first: str, last: str
) -> None:
    found = []
    for version in schema.versions():
        flag = schema.load(version).flag(name)
        if flag is not None and flag.limits is not None and flag.limits.constraints == bounds:
            found.append(version)
    assert (found[0], found[-1]) == (first, last)


def test_limits_of_a_config_that_is_not_made_refuse_nothing() -> None:
    assert verdict("0.33.0", "M --max-loras 0").accepted
    assert "at least 1" in refused("0.33.0", "M --enable-lora --max-loras 0").found
    assert "at least 1" in refused("0.10.0", "M --enable-lora --max-loras 0").found


def test_partial_prefills_are_refused_where_no_engine_can_have_them() -> None:
    """Up to 0.11.0 V0 is taken instead, unless a variable forbids it."""
    line = ["M", "--max-num-partial-prefills", "2"]
    for version in ("0.8.0", "0.11.0"):
        assert check_command_line(schema.load(version), line).accepted
        assert check_command_line(schema.load(version), line, {"VLLM_USE_V1": "0"}).accepted
        assert not check_command_line(schema.load(version), line, {"VLLM_USE_V1": "1"}).accepted


@each_row("line", ["M --tp 2", "M --tp=2"])
def test_a_short_option_with_two_dashes_is_meant(line: str) -> None:
    problem = refused("0.33.0", line)
    assert problem.replacement == "--tensor-parallel-size"


def test_two_dashes_before_a_short_option_are_rewritten() -> None:
    assert verdict("0.33.0", "M --tp 2").rewritten == ("M", "--tensor-parallel-size", "2")
    assert verdict("0.33.0", "M --tp=2").rewritten == ("M", "--tensor-parallel-size", "2")


def test_an_option_of_a_plugin_is_called_that() -> None:
    problem = refused("0.33.0", "M --omni")
    assert "plug-in vllm-omni" in problem.found
    assert problem.replacement is None


def test_a_long_dash_of_an_editor_is_named_with_what_to_write() -> None:
    problem = check(schema.load("0.33.0"), ["M", "\u2013max-model-len", "32k"])[0]
    assert problem.found.endswith("does not read it as an option: write `--max-model-len`")
    assert "write `-tp`" in check(schema.load("0.33.0"), ["M", "\u2013tp", "2"])[0].found
    assert "is not an option" in check(schema.load("0.33.0"), ["M", "\u2013nope"])[0].found


def test_curly_quotes_of_an_editor_become_straight_ones() -> None:
    found = verdict("0.33.0", ["M", "--speculative-config", "\u201c{}\u201d"])
    assert not found.accepted
    curly = "{\u201cmethod\u201d: \u201cngram\u201d, \u201cnum_speculative_tokens\u201d: 2}"
    assert verdict("0.33.0", ["M", "--speculative-config", curly]).rewritten == (
        "M",
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 2}',
    )


def test_what_is_no_json_is_said_in_our_words() -> None:
    found = refused("0.33.0", ["M", "--allowed-origins", "*"]).found
    assert found == "`*` is not JSON: column 1: a JSON value is expected there"


def test_a_line_in_quotes_is_not_taken_for_a_model() -> None:
    assert "remove the quotes" in refused("0.33.0", ["org/name --port 8000"]).found
    assert verdict("0.33.0", ["/srv/my models/q"]).accepted


def test_a_limit_of_what_no_model_takes_is_a_warning() -> None:
    """vLLM takes it, and goes on taking pictures."""
    line = ["M", "--limit-mm-per-prompt", '{"images": 0}']
    assert "'images' is not a kind of item" in warned("0.33.0", line).found
    assert verdict("0.33.0", [*line[:2], '{"image": 0}']).problems == ()


def test_an_empty_key_is_a_warning() -> None:
    assert "clients that send no key" in warned("0.33.0", ["M", "--api-key", ""]).found
    assert verdict("0.33.0", ["M", "--api-key", "k"]).problems == ()


@each_row(
    ("line", "accepted"),
    [
        ('--speculative-config {"method":"eagle3","num_speculative_tokens":3}', False),
        ('--speculative-config {"num_speculative_tokens":3}', False),
        ('--speculative-config {"method":"eagle3","model":"d","num_speculative_tokens":3}', True),
        ('--speculative-config {"method":"deepseek_mtp","num_speculative_tokens":1}', True),
        ('--speculative-config {"method":"suffix","num_speculative_tokens":8}', True),
        ("--spec-tokens 3", False),
        ("--spec-tokens 3 --spec-model d", True),
        ("--spec-tokens 3 --spec-method ngram", True),
        ('--limit-mm-per-prompt {"video":{"count":1,"num_frames":0}}', False),
        ('--limit-mm-per-prompt {"image":"4"}', False),
        ('--limit-mm-per-prompt {"image":0,"video":{"count":1,"num_frames":32}}', True),
        ("--distributed-executor-backend my_module.Executor", True),
        ("--middleware auth.Check --middleware other", False),
        ("--middleware auth.Check --middleware a.b.other", True),
        ("--logits-processors my.module:Class", True),
        ("--seed 4294967296", False),
        ("--seed 4294967295", True),
        ("--port 65536 --uds /run/vllm.sock", True),
        ("--port 65535", True),
        ("--host http://0.0.0.0", False),
        ("--host http://gpu1:8000/v1", False),
        ("--host 0.0.0.0:8000", False),
        ("--host [::]", False),
        ("--host gpu1/", False),
        ("--host ::", True),
        ("--host fe80::1%eth0", True),
        ("--host gpu1.example.org", True),
        ("--host http://0.0.0.0 --uds /run/vllm.sock", True),
    ],
)
def test_what_the_start_cannot_do_with_a_value(line: str, accepted: bool) -> None:
    assert verdict("0.33.0", f"M {line}").accepted is accepted


def test_deprecated_is_a_remark() -> None:
    """What still works and will not is said, and stops nothing."""
    assert warned("0.33.0", "M --disable-cascade-attn").kind is Kind.DEPRECATED


def test_given_twice_is_a_remark() -> None:
    """Of a flag that is given twice only the last use counts."""
    problem = warned("0.33.0", "M --dtype half --dtype bfloat16")
    assert (problem.kind, problem.argument) == (Kind.REPEATED, "--dtype half")


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("--port 8000", Severity.WARN),
        ("--api-key secret org/model", Severity.REFUSE),
        ("--model org/model", Severity.WARN),
        ("--enforce-eager true", Severity.REFUSE),
    ],
)
def test_model_that_is_missing_or_swallowed(line: str, severity: Severity) -> None:
    """A command line whose model is not where it belongs is not passed over."""
    (problem,) = verdict("0.32.0", line).problems
    assert (problem.kind, problem.severity) == (Kind.MODEL, severity)


def test_model_flag_is_refused_where_it_was() -> None:
    """0.9.0 refused --model; the model first is right in all releases."""
    problem = refused("0.9.0", "--model org/model --port 8000")
    assert (problem.kind, problem.by) == (Kind.MODEL, JudgedBy.PARSER)
    assert verdict("0.9.0", "org/model --port 8000").accepted


@each_row("version", ["0.8.3", "0.9.1", "0.10.2", "0.11.0"])
def test_a_model_flag_that_is_refused_is_one_sentence(version: str) -> None:
    (problem,) = verdict(version, "--port 8000 --model org/model").problems
    assert problem.by is JudgedBy.PARSER


def test_a_parser_that_no_request_will_use_is_a_warning() -> None:
    unknown, unread = verdict("0.33.0", "M --tool-call-parser mine").problems
    assert "has no tool call parser `mine`" in unknown.found
    assert (unread.kind, unread.severity) == (Kind.UNREAD, Severity.WARN)


def test_a_release_without_a_kind_of_parallelism_has_one_rank_of_it() -> None:
    """One rank cannot be divided among two nodes."""
    line = "M --nnodes 2 --node-rank 0 --master-addr 10.0.0.1"
    old = next(v for v in schema.versions() if schema.load(v).flag("--nnodes"))
    assert not schema.load(old).flag("--prefill-context-parallel-size")
    assert "--nnodes" in refused(old, line).found


def test_a_flag_of_drafting_is_refused_only_beside_async_scheduling() -> None:
    drafting = (
        "M --speculative-config "
        '{"method":"eagle","model":"d","num_speculative_tokens":2,"disable_padded_drafter_batch":true}'
    )
    assert verdict("0.32.0", drafting).problems == ()
    assert "padded" in refused("0.32.0", f"{drafting} --async-scheduling").found


def test_every_key_of_a_json_value_that_is_wrong_is_named() -> None:
    line = 'M --speculative-config {"nope":1,"num_speculative_tokens":"many"}'
    found = "\n".join(one.found for one in verdict("0.33.0", line).problems)
    assert "nope" in found
    assert "num_speculative_tokens" in found


def test_config_file_is_not_judged_in_silence() -> None:
    """A file of flags is on the node: what it says was not checked, and that is said."""
    assert "did not check" in warned("0.33.0", "M --config /etc/vllm/m.yaml").found
    assert refused("0.33.0", "M --config /etc/vllm/m.json").by is JudgedBy.PARSER
    assert "ignores" in refused("0.33.0", "M --config=/etc/vllm/m.yaml").found


# -- variables -------------------------------------------------------------------------------------


@each_row(
    ("name", "value", "by", "rewritten"),
    [
        ("VLLM_USE_V1", "1", JudgedBy.ADVICE, ()),
        (
            "VLLM_ATTENTION_BACKEND",
            "FLASHINFER",
            JudgedBy.ADVICE,
            ("--attention-backend", "FLASHINFER"),
        ),
        ("VLLM_LOGING_LEVEL", "DEBUG", JudgedBy.ADVICE, None),
        ("VLLM_PORT", "tcp://10.0.0.1:8000", JudgedBy.START, None),
        ("VLLM_WORKER_MULTIPROC_METHOD", "forkserver", JudgedBy.START, None),
        ("VLLM_BATCH_INVARIANT", "true", JudgedBy.START, None),
    ],
)
def test_variable_without_effect_or_value(
    name: str, value: str, by: JudgedBy, rewritten: tuple[str, ...] | None
) -> None:
    """A variable that the release does not read, or cannot read, is refused."""
    problem = refused("0.33.0", "M", **{name: value})
    assert (problem.kind, problem.by, problem.rewritten) == (Kind.ENVIRONMENT, by, rewritten)
    assert problem.argument == f"{name}={value}"


def test_variables_that_are_right_are_none_of_our_business() -> None:
    """What vLLM reads, and what is not vLLM's, passes."""
    known = {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_PORT": "5000",
        "HF_HOME": "/m",
        "NCCL_DEBUG": "WARN",
    }
    assert verdict("0.33.0", "M", **known).problems == ()


@pytest.mark.parametrize(
    ("value", "clear"),
    [
        *((word, True) for word in ("", "0", "1", "true", "False", " TRUE ")),
        ("yes", False),
        ("2", False),
    ],
)
def test_a_switch_is_clear_only_in_the_words_that_vllm_compares_with(
    value: str, clear: bool
) -> None:
    """Any other word means off, which who wrote `yes` did not mean."""
    found = verdict("0.33.0", "M", VLLM_USE_PRECOMPILED=value)

    assert found.accepted
    assert [each.found for each in found.problems] == (
        []
        if clear
        else [f"`{value}` is neither 1 nor 0, and vLLM may read it as 0 (off): write 1 or 0"]
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("VLLM_LOGING_LEVEL", "VLLM_LOGGING_LEVEL"),
        ("VLLM_XLA_CACHE", "VLLM_XLA_CACHE_PATH or VLLM_MEDIA_CACHE"),
        ("VLLM_ATTENTION", None),
    ],
)
def test_at_most_two_near_variables_are_proposed_and_none_that_is_far(
    name: str, near: str | None
) -> None:
    assert refused("0.33.0", "M", **{name: "1"}).replacement == near


def test_vllm_refuses_unknown_variables_where_it_is_told_to() -> None:
    """--fail-on-environ-validation makes vLLM itself end for a variable that it does not know."""
    line = "M --fail-on-environ-validation"
    assert refused("0.33.0", line, VLLM_USE_V1="1").by is JudgedBy.START


# -- rewriting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.16.0", "0.24.0", "0.33.0"])
def test_rewritten_line_is_accepted(version: str) -> None:
    """A command line that is given back as rewritten is accepted, whatever came in."""
    rewritten = 0
    for line in lines.written():
        found = verdict(version, line)
        if found.rewritten is not None:
            rewritten += 1
            assert verdict(version, found.rewritten).accepted, line
    assert rewritten > 30


def test_rewriting_keeps_the_rest() -> None:
    """Only what is refused changes, and it changes in its place."""
    line = "M --dtype half --swap-space 4 --worker-use-ray --gpu_memory_util 0.8 -tp 2"
    words = "M --dtype half --distributed-executor-backend ray --gpu-memory-utilization 0.8 -tp 2"
    assert verdict("0.33.0", line).rewritten == tuple(words.split())


def test_nothing_is_rewritten_halfway() -> None:
    """Where one thing takes a person there is no rewritten command line."""
    assert verdict("0.33.0", "M --swap-space 4 --dtype fp16").rewritten is None


# -- the command -----------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(flags, ["check", *arguments], standalone_mode=False)
    return int(done.return_value if done.exception is None else 2), done.output


def test_command_says_accepted_and_refused() -> None:
    """Status 0 and 1, and what an operator needs: what, since when, what instead."""
    assert run("--vllm", "0.33.0", "--", "M", "-tp", "2") == (0, "accepted by vLLM 0.33.0\n")
    status, output = run("--vllm", "0.33.0", "--", "vllm", "serve", "M", "--swap-space", "4")
    assert status == 1
    assert "--swap-space 4" in output
    assert "0.18.0" in output
    assert "vllm serve M\n" in output
    assert run("--vllm", "0.33.0", "--", "serve", "M")[0] == 0
    assert run("--vllm", "0.33.0", "--", "serve")[0] == 0  # a model of that name


@pytest.mark.parametrize("given", ["=x", "FOO", "A B=1"])
def test_a_variable_without_a_name_is_refused(given: str) -> None:
    done = CliRunner().invoke(flags, ["check", "--env", given, "--", "M"])
    assert (done.exit_code, "write the variable as NAME=VALUE." in done.output) == (2, True)


def test_command_prints_json() -> None:
    """JSON has the verdict, the parser's own verdict, and each problem's places."""
    status, output = run("--vllm", "v0.33.0+cu129", "--json", "--", "M", "--nnodes", "0")
    found = json.loads(output)
    assert (status, found["accepted"], found["parser_accepts"]) == (1, False, True)
    assert found["problems"][0]["at"] == [1, 2]


def test_command_reads_an_extracted_release(tmp_path: Path) -> None:
    """A release that is not packaged is judged by the file that `extract` wrote."""
    document = json.loads(schema.documents()["0.33.0"])
    document["vllm"] = "0.34.0"
    file = tmp_path / "0.34.0.json"
    file.write_text(json.dumps(document))
    assert run("--vllm", str(file), "--", "M") == (0, "accepted by vLLM 0.34.0\n")


def test_unknown_release_is_never_assumed() -> None:
    """An unknown release ends in one sentence that names those that are known."""
    done = CliRunner().invoke(flags, ["check", "--vllm", "0.99.0", "--", "M"])
    assert isinstance(done.exception, FleetError)
    assert "0.33.0" in str(done.exception)


def test_command_loads_nothing_heavy() -> None:
    """The check starts cold in 300 ms: none of what takes longer is imported."""
    code = (
        "import sys; from gpufleet.cli.flags_command import flags; "
        "flags.main(['check', '--vllm', '0.33.0', '--', 'M', '-tp', '2'], standalone_mode=False); "
        "print([m for m in ('yaml', 'rich', 'pyinfra', 'pydantic', 'gevent', 'difflib', 'jinja2') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_check_is_fast_once_loaded() -> None:
    """A long command line is judged in far less than it takes to start Python."""
    known = schema.load("0.33.0")
    line = [word for each in lines.written()[:60] for word in each[1:]]
    check(known, line)
    start = time.process_time()
    check(known, line)
    assert time.process_time() - start < 0.2


def test_no_api_servers_are_a_warning() -> None:
    """vLLM 0.32.0 takes 0 for `--headless`: an engine without a server."""
    found = warned("0.32.0", ["M", "--api-server-count", "0"]).found
    assert found.startswith("with 0 API servers, vLLM starts headless and answers no requests")
    assert verdict("0.32.0", ["M", "--api-server-count", "0", "--headless"]).problems == ()
    assert verdict("0.32.0", ["M", "--api-server-count", "1"]).problems == ()


@each_row(
    ("version", "line", "switch"),
    [
        ("0.33.0", "--tool-call-parser hermes", "--enable-auto-tool-choice"),
        ("0.8.5", "--tool-call-parser hermes", "--enable-auto-tool-choice"),
        ("0.33.0", "--max-loras 4", "--enable-lora"),
        ("0.8.5", "--max-lora-rank 64", "--enable-lora"),
        ("0.32.0", "--fully-sharded-loras", "--enable-lora"),
        ("0.32.0", "--max-log-len 100", "--enable-log-requests"),
        ("0.32.0", "--cpu-offload-params experts", "--cpu-offload-gb"),
        ("0.32.0", "--offload-num-in-group 1", "--offload-group-size"),
        ("0.32.0", "--kv-offloading-backend lmcache", "--kv-offloading-size"),
    ],
)
def test_an_option_that_is_read_only_beside_another_is_a_warning(
    version: str, line: str, switch: str
) -> None:
    problem = warned(version, f"M {line}")
    option = line.partition(" ")[0]
    assert problem.found == f"`{option}` has no effect without `{switch}`"
    assert problem.kind is Kind.UNREAD
    value = "" if switch.startswith("--enable") else " 1"
    assert verdict(version, f"M {line} {switch}{value}").problems == ()


def test_requests_are_logged_by_default_where_a_release_has_no_switch_for_it() -> None:
    assert schema.load("0.9.0").flag("--enable-log-requests") is None
    assert verdict("0.9.0", "M --max-log-len 100").problems == ()


def test_an_option_that_is_refused_gets_no_remark_that_it_has_no_effect() -> None:
    line = "M --offload-backend prefetch --offload-num-in-group 1"
    assert refused("0.32.0", line).kind is Kind.CONFLICT


@each_row(
    "words",
    [
        ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
        [
            "--kv-transfer-config",
            '{"kv_connector": "Own", "kv_role": "kv_both", "kv_connector_module_path": "own.mod"}',
        ],
        ["--show-hidden-metrics-for-version", "0.31"],
        ["--show-hidden-metrics-for-version", "v0.31.0rc1"],
        ["--compilation-config", '{"cudagraph_mode": "NONE", "cudagraph_capture_sizes": []}'],
        ["--enforce-eager", "--max-cudagraph-capture-size", "0"],
        ["--max-cudagraph-capture-size", "1"],
        ["--worker-cls", "auto"],
        ["--worker-cls", "my.module.Worker"],
    ],
)
def test_what_is_like_a_refused_value_and_starts_is_accepted(words: list[str]) -> None:
    assert verdict("0.32.0", ["M", *words]).accepted


@each_row(
    ("line", "said"),
    [
        (
            "--enforce-eager --cudagraph-capture-sizes 1 2",
            "`--cudagraph-capture-sizes` has no effect together with `--enforce-eager`",
        ),
        ("--enforce-eager --max-cudagraph-capture-size 8", "has no effect together with"),
        (
            '--hf-overrides {"rope_scaling":{"rope_type":"yarm","factor":4}}',
            "`rope_scaling` has the type `yarm`. vLLM does not know this type",
        ),
        ('--hf-overrides {"rope_parameters":{"rope_type":"YARN"}}', "has the type `YARN`"),
    ],
)
def test_what_does_nothing_or_ends_most_starts_is_a_warning(line: str, said: str) -> None:
    assert said in warned("0.32.0", f"M {line}").found


@each_row(
    "line",
    [
        '--hf-overrides {"rope_scaling":{"rope_type":"yarn","factor":4}}',
        '--hf-overrides {"rope_parameters":{"full_attention":{"rope_type":"linear"}}}',
        '--hf-overrides {"rope_scaling":null}',
        "--cudagraph-capture-sizes 1 2",
    ],
)
def test_what_vllm_does_with_these_is_what_was_asked(line: str) -> None:
    assert verdict("0.32.0", f"M {line}").problems == ()


@each_row(
    ("name", "value", "said"),
    [
        ("NCCL_IB_DISABLE", "yes", "is not a number, so NCCL ignores it and uses its default"),
        ("NCCL_P2P_DISABLE", "true", "is not a number, so NCCL ignores it and uses its default"),
        ("nccl_debug", "INFO", "no program reads nccl_debug"),
        ("vllm_use_modelscope", "1", "no program reads vllm_use_modelscope"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split=128", "an option of PyTorch's allocator"),
    ],
)
def test_a_variable_that_its_library_does_not_read_so_is_a_warning(
    name: str, value: str, said: str
) -> None:
    found = check_command_line(schema.load("0.33.0"), ["M"], {name: value})
    (problem,) = found.problems
    assert said in problem.found
    assert problem.severity is Severity.WARN


@each_row(
    ("name", "value"),
    [
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_IB_TC", "0x6a"),
        ("NCCL_MIN_NCHANNELS", " 8 "),
        ("http_proxy", "http://proxy:3128"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
        ("PYTORCH_ALLOC_CONF", ""),
    ],
)
def test_a_variable_that_its_library_reads_is_not_remarked_on(name: str, value: str) -> None:
    assert check_command_line(schema.load("0.33.0"), ["M"], {name: value}).problems == ()
