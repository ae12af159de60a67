"""The rules: each line that a rule is for gives that rule; data with a mistake is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from gpufleet.catalog.checks import CHECKS
from gpufleet.checks import xid_table
from gpufleet.checks.finding import Severity
from gpufleet.cli.main import COMMANDS
from gpufleet.errors import FleetError
from gpufleet.failures.diagnosis import explain
from gpufleet.failures.evidence import Evidence, is_met
from gpufleet.failures.log_prefix import split_prefix
from gpufleet.failures.log_reader import LogLine
from gpufleet.failures.rule_file import Kind, Rule, parse, rules
from gpufleet.settings.lookup import all_settings
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tools import failures_reference

LINES: dict[str, list[str]] = yaml.safe_load(
    (ROOT / "tests/data/failures/lines.yml").read_text("utf-8")
)
RULES = {rule.id: rule for rule in rules()}
SOUND: dict[str, Any] = {
    "id": "a",
    "component": "vllm",
    "lines": ["a plain text"],
    "cause": "c",
    "fix": "f",
    "source": "s",
}


def one(text: str) -> list[LogLine]:
    return [LogLine("a.log", 1, text)]


def first_rule(text: str) -> Rule | None:
    """The rule of a line: its cause, or what else was found."""
    found = explain(one(text))
    return next((each.rule for each in (*found.causes, *found.consequences, *found.notes)), None)


def test_every_rule_has_a_line() -> None:
    assert set(LINES) == set(RULES)


@each_row(
    ("rule_id", "line"),
    [(rule_id, line) for rule_id, lines in LINES.items() for line in lines],
)
def test_a_line_gives_its_rule_and_no_other(rule_id: str, line: str) -> None:
    found = explain(one(line))
    ids = [each.rule.id for each in (*found.causes, *found.consequences, *found.notes)]
    assert ids == [rule_id]
    kind = RULES[rule_id].kind
    assert [each.rule.id for each in found.causes] == ([rule_id] if kind is Kind.FAILURE else [])
    assert (found.unknown is not None) == (kind is Kind.DERIVED)


def test_every_pattern_has_a_line() -> None:
    unseen = [
        (rule.id, pattern.written)
        for rule in RULES.values()
        for pattern in rule.patterns
        if not any(pattern.matches(split_prefix(line).text) for line in LINES[rule.id])
    ]
    assert unseen == []


def test_what_rules_name_exists() -> None:
    """Commands of this package, settings, checks."""
    settings, wrong = all_settings(), []
    for rule in RULES.values():
        for advice in (rule.advice, *(tell.advice for tell in rule.tells)):
            words = advice.command.split()
            if words[:1] == ["gpufleet"] and words[1] not in COMMANDS:
                wrong.append((rule.id, advice.command))
            if advice.setting and advice.setting not in settings:
                wrong.append((rule.id, advice.setting))
            wrong += [
                (rule.id, page)
                for page in re.findall(r"docs/[\w./-]+\.md", advice.fix)
                if not (ROOT / page).is_file()
            ]
        wrong += [
            (rule.id, tell.when)
            for tell in rule.tells
            if "check " in tell.when and tell.when.split()[-1] not in CHECKS
        ]
    assert wrong == []


def test_a_fix_by_another_release_has_the_version_as_its_setting() -> None:
    """Doctor prints the setting after the fix."""
    wrong = [
        rule.id
        for rule in RULES.values()
        for advice in (rule.advice, *(tell.advice for tell in rule.tells))
        if ".version`" in advice.fix and not advice.setting.endswith(".version")
    ]
    assert wrong == []


def test_an_xid_that_takes_a_gpu_out_of_service_is_a_failure_and_a_harmless_one_is_not() -> None:
    wrong = []
    for number, kind in xid_table.KINDS.items():
        rule = first_rule(f"NVRM: Xid (PCI:0000:cb:00): {number}, pid=1")
        assert rule
        if kind.severity is Severity.BLOCK and rule.kind is not Kind.FAILURE:
            wrong.append(number)
        if kind.action == xid_table.IGNORE and kind.severity is Severity.INFO and number != 43:
            wrong += [number] * (rule.kind is not Kind.NOTE)
        if number in xid_table.OF_PROGRAMS and number != 45:
            wrong += [number] * (rule.id not in {"xid-program", "xid-ended"})
    assert wrong == []


def test_what_ends_other_processes_is_never_the_cause() -> None:
    derived = {rule.id for rule in RULES.values() if rule.derived}
    assert {"engine-init", "engine-dead", "shm-ring-60", "graph-replay"} <= derived


@each_row(
    ("change", "says"),
    [
        ({"lines": []}, "it has no lines"),
        ({"lines": "text"}, "lines is not a list of texts"),
        ({"lines": ["abc"]}, "shorter than 4 characters"),
        ({"lines": ["/a plain (text/"]}, "is not a regular expression"),
        ({"lines": ["/a plain .*text/"]}, "a repeat without a bound"),
        ({"lines": [r"/plain \d+/"]}, "a repeat without a bound"),
        ({"lines": ["/plain .{3,}/"]}, "a repeat without a bound"),
        ({"lines": ["/plain (ab){1,9}/"]}, "repeats a group"),
        ({"lines": ["/plain text|other text/"]}, "alternatives at its top level"),
        ({"lines": [r"/\d\d(plain)/"]}, "no plain text"),
        ({"lines": ["/plain.{0,300}text.{0,300}x/"]}, "may match a line in 90000 ways"),
        ({"component": "gpu"}, "component 'gpu' is none of"),
        ({"kind": "error"}, "kind 'error' is none of"),
        ({"cause": ""}, "it has no cause"),
        ({"couse": "x"}, "unknown keys: couse"),
        ({"follows": ["b"]}, "there is no rule b"),
        ({"tells": [{"when": "seen b", "cause": "c", "fix": "f", "look": "l"}]}, "no rule b"),
        ({"tells": [{"when": "moon full", "cause": "c", "fix": "f", "look": "l"}]}, "when 'moon"),
    ],
)
def test_data_with_a_mistake_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(FleetError, match=re.escape(says)):
        parse(iter([SOUND | change]))


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(FleetError) as error:
        parse(iter([SOUND, SOUND, SOUND | {"id": "b", "cause": ""}, 3]))
    assert error.value.problems == (
        "rule b: it has no cause",
        "rule number 3: it is not a mapping",
        "rule a: 2 rules have this id",
    )


@each_row(
    ("condition", "evidence", "met"),
    [
        ("check fabric-state", Evidence(checks={"fabric-state": False}), True),
        ("check fabric-state", Evidence(checks={"fabric-state": True}), False),
        ("not check fabric-state", Evidence(checks={"fabric-state": True}), True),
        ("not check fabric-state", Evidence(checks={}), None),
        ("check fabric-state", Evidence(), None),
        ("seen a", Evidence(), True),
        ("seen b", Evidence(), None),
        ("gpu GB10", Evidence(gpus=("NVIDIA GB10",)), True),
        ("gpu GB10", Evidence(gpus=("NVIDIA H100",)), False),
        ("signal SIGKILL", Evidence(signal="SIGKILL"), True),
        ("signal SIGKILL", Evidence(signal=""), False),
    ],
)
def test_a_condition_is_met_not_met_or_not_known(
    condition: str, evidence: Evidence, met: bool | None
) -> None:
    assert is_met(condition, evidence, {"a"}) is met


def test_the_reference_page_is_what_the_rules_say() -> None:
    """Otherwise: `python -m tools.failures_reference`."""
    assert failures_reference.PAGE.read_text("utf-8") == failures_reference.page()
