"""A stored measurement is read back as it was, and used only for what it was measured on."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.load_test.fingerprint import Subject
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.result import (
    MeasuredRate,
    Measurement,
    RateBracket,
    alert_remarks,
    measured_rate,
    read,
    read_measurements,
    write,
)
from tests.support.rows import each_row
from tests.unit.load_test.sample_results import (
    CLOSED,
    CONTRACT,
    LEVELS,
    SERIES,
    SUBJECT,
    WHEN,
    level,
    measurement,
)

NOW = WHEN + dt.timedelta(days=3)


def changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a copy of a document with one value changed; "levels.0.kept" is its place."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    *way, last = path.split(".")
    place: Any = copy
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    return copy


# -- files


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    found = measurement(notes=("another client was there",))
    assert read(write(found, tmp_path)) == found
    nothing = measurement(levels=(), found=RateBracket(None, None, "cut off"))
    assert read(write(nothing, tmp_path)) == nothing
    whole = measurement(closed=CLOSED, series=SERIES)
    assert read(write(whole, tmp_path)) == whole


def test_the_file_is_named_by_model_target_and_time_and_is_readable_by_all(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        file = write(measurement(), tmp_path / "measurements")
    finally:
        os.umask(before)
    assert file.name == "llama_replica-llama-0_20261120T123005Z.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_name_of_a_model_never_leads_out_of_the_directory(tmp_path: Path) -> None:
    file = write(measurement(model="../../etc/passwd"), tmp_path / "in")
    assert file.parent == tmp_path / "in"
    assert read(file).model == "../../etc/passwd"


def test_a_second_measurement_of_the_same_second_leaves_the_first_alone(tmp_path: Path) -> None:
    one = write(measurement(), tmp_path)
    other = write(measurement(version="0.3.0"), tmp_path)
    assert (read(one).version, read(other).version) == ("0.2.0", "0.3.0")


def test_a_number_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    broken = measurement(levels=(level(2.0, 1, 1, (0.0, float("nan")), "kept"),))
    with pytest.raises(ValueError, match="JSON compliant"):
        write(broken, tmp_path)
    assert [*tmp_path.iterdir()] == []


WHOLE = measurement().as_json()
DEEP = '{"format": 1, "a": ' + "[" * 100_000 + "]" * 100_000 + "}"


@each_row(
    "words, content",
    [
        ("is not JSON: column", json.dumps(WHOLE)[:900]),
        ("is empty", ""),
        ("must contain a JSON object", "[]"),
        ("no `format`", json.dumps(changed(WHOLE, "format", "1"))),
        ("no `format`", json.dumps({"version": "0.2.1", "run": {"uid": "a"}})),
        ("newer gpufleet", json.dumps(changed(WHOLE, "format", 2))),
        ("levels.0.kept", json.dumps(changed(WHOLE, "levels.0.kept", "400"))),
        ("levels.0.kept", json.dumps(changed(WHOLE, "levels.0.kept", 1.5))),
        ("levels.1.verdict", json.dumps(changed(WHOLE, "levels.1.verdict", "perhaps"))),
        ("no key `levels.2.speed`", json.dumps(changed(WHOLE, "levels.2.speed", 3))),
        ("no key `colour`", json.dumps(changed(WHOLE, "colour", "red"))),
        ("contract", json.dumps(changed(WHOLE, "contract", None))),
        ("found: field required", json.dumps({k: v for k, v in WHOLE.items() if k != "found"})),
        ("time zone", json.dumps(changed(WHOLE, "when", "2026-11-20T12:30:05"))),
        ("replicas", json.dumps(changed(WHOLE, "replicas", 0))),
        ("replicas_of", json.dumps(changed(WHOLE, "replicas_of", 0))),
        ("NaN", json.dumps(WHOLE).replace("900.0", "NaN")),
        ("too many nested levels", DEEP),
    ],
    ids=lambda value: value[:20],
)
def test_a_damaged_or_newer_file_is_one_sentence(words: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(content)
    with pytest.raises(FleetError) as raised:
        read(file)
    (problem,) = raised.value.problems
    assert problem.startswith(f"{file}: ")
    assert words in problem
    assert "\n" not in problem


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(FleetError, match="UTF-8"):
        read(file)
    with pytest.raises(FleetError, match="No such file"):
        read(tmp_path / "none.json")


def test_control_characters_of_a_file_never_reach_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps({**measurement().as_json(), "\x1b[2J": 1}))
    with pytest.raises(FleetError) as raised:
        read(file)
    assert "\x1b" not in str(raised.value)


def test_measurements_are_in_the_order_of_time_and_damaged_files_are_named(
    tmp_path: Path,
) -> None:
    assert read_measurements(tmp_path / "none").measurements == ()
    write(measurement(when=WHEN + dt.timedelta(hours=1), version="2"), tmp_path)
    write(measurement(version="1"), tmp_path)
    write(measurement(model="qwen", when=WHEN + dt.timedelta(hours=2), version="3"), tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "llama.report.json").write_text("{}")
    (tmp_path / ".half.json").write_text("{")
    found = read_measurements(tmp_path)
    assert [each.version for each in found.measurements] == ["1", "2", "3"]
    assert [str(tmp_path / "broken.json") in each for each in found.problems] == [True]


# -- fingerprints


def test_the_fingerprint_is_of_weights_release_options_and_gpus_alone() -> None:
    same = replace(
        SUBJECT,
        arguments=(*reversed(SUBJECT.arguments), "--host 10.0.0.7", "--node-rank 1"),
        nodes=("gpu-09",),
        driver="590.1",
    )
    other_port = tuple(each.replace("8000", "8001") for each in SUBJECT.arguments)
    assert same.fingerprint == replace(SUBJECT, arguments=other_port).fingerprint
    assert same.fingerprint == SUBJECT.fingerprint
    # Worked out by hand from the definition.
    text = json.dumps(
        {
            "arguments": ["--enable-prefix-caching", "--max-num-seqs 128",
                          "--tensor-parallel-size 2"],
            "hardware": ["2 x NVIDIA H100 80GB HBM3"],
            "release": SUBJECT.release,
            "revision": SUBJECT.revision,
            "weights": SUBJECT.weights,
        }
    )  # fmt: skip
    assert SUBJECT.fingerprint.digest == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert SUBJECT.fingerprint.differences(SUBJECT.fingerprint) == ()


@each_row(
    "words, difference",
    [
        ("weights", {"weights": "meta-llama/Llama-3.2-1B"}),
        ("revision", {"revision": "0e9e39f249a16976918f6564b8830bc894c89659"}),
        ("release", {"release": "0.33.0-ffff"}),
        ("--max-num-seqs 256", {"arguments": (*SUBJECT.arguments[:-2], "--max-num-seqs 256")}),
        ("4 x NVIDIA H100 80GB HBM3", {"gpus": {"NVIDIA H100 80GB HBM3": 4}}),
        ("2 x NVIDIA H200", {"gpus": {"NVIDIA H200": 2}}),
    ],
    ids=str,
)
def test_what_changes_capacity_changes_the_fingerprint(
    words: str, difference: dict[str, Any]
) -> None:
    other = replace(SUBJECT, **difference).fingerprint
    assert other.digest != SUBJECT.fingerprint.digest
    assert words in "; ".join(SUBJECT.fingerprint.differences(other))


def test_keys_in_arguments_are_in_no_file_and_no_fingerprint(tmp_path: Path) -> None:
    def subject(key: str) -> Subject:
        return replace(
            SUBJECT,
            arguments=(
                f"--api-key {key}",
                f"--api-key={key}",
                f'--speculative-config \'{{"hf_token": "{key}"}}\'',
                f"--download-url https://me:{key}@example.net/",
            ),
        )

    one, other = subject("sesame-open"), subject("mellon-mellon")
    assert one.fingerprint == other.fingerprint
    text = write(measurement(subject=one), tmp_path).read_text()
    assert "sesame" not in text
    assert "--speculative-config" in text


# -- alerts


def test_alerts_that_the_best_level_would_fire_are_named_with_what_they_count() -> None:
    """A contract for 95 of 100 is kept where the p99 that an alert compares is above it."""
    kept = replace(
        LEVELS[1], ttft={"p95": 0.4, "p99": 0.9}, itl={"p95": 0.03, "p99": 0.08}, e2e={"p99": 99}
    )

    assert alert_remarks(kept, CONTRACT) == (
        "at 4 requests/s the p99 of TTFT is 0.9 s, which is above the objective of 0.5 s, so "
        "VllmTtftAboveObjective may fire at this load",
        "at 4 requests/s the p99 of pauses between tokens is 0.08 s, which is above the objective "
        "of 0.05 s, so VllmItlAboveObjective may fire at this load",
    )
    assert alert_remarks(LEVELS[0], CONTRACT) == ()
    assert alert_remarks(None, CONTRACT) == ()


# -- what a replica carries


def rate(*found: Measurement, subject: Subject = SUBJECT, **more: Any) -> MeasuredRate | str:
    return measured_rate(found, "llama", subject.fingerprint, NOW, **more)


def test_a_replica_carries_the_highest_rate_that_kept_the_contract() -> None:
    found = rate(measurement())
    assert isinstance(found, MeasuredRate)
    assert (found.requests_per_second, found.missed) == (4.0, 8.0)
    assert found.age_seconds == 3 * 24 * 3600
    assert found.fingerprint == SUBJECT.fingerprint.digest
    assert str(found) == "4 requests/s per replica, measured 72 h ago (replica llama-0)"


def test_replicas_behind_a_gateway_share_its_rate_and_one_replica_alone_is_preferred() -> None:
    gateway = measurement(
        target="gateway gw-1",
        replicas=3,
        found=RateBracket(10.5, 12.0, "found"),
        when=WHEN + dt.timedelta(days=1),
    )
    shared = rate(gateway)
    assert isinstance(shared, MeasuredRate)
    assert (shared.requests_per_second, shared.missed) == (3.5, 4.0)
    assert "shared by 3 replicas" in str(shared)
    alone = rate(measurement(), gateway)
    assert isinstance(alone, MeasuredRate)
    assert alone.requests_per_second == 4.0


def test_what_is_left_in_a_wave_is_divided_by_the_replicas_that_served() -> None:
    """Two of three carried 9: each of them 4.5, not 3, whatever else is declared."""
    left = measurement(
        target="gateway gw-1", replicas=2, replicas_of=3, found=RateBracket(9.0, 10.0, "found")
    )

    found = rate(left)

    assert isinstance(found, MeasuredRate)
    assert (found.requests_per_second, found.missed) == (4.5, 5.0)


def test_a_result_without_the_number_of_planned_replicas_is_read() -> None:
    """As those before it was counted."""
    plain = measurement(replicas=2, replicas_of=3).as_json()
    assert (plain["replicas"], plain.pop("replicas_of")) == (2, 3)

    assert Measurement.from_json(plain).served_by == "2 replicas"


def test_the_newest_result_counts_unless_it_says_nothing() -> None:
    later = WHEN + dt.timedelta(days=1)
    newer = measurement(when=later, found=RateBracket(3.0, 3.5, "found"))
    silent = measurement(
        when=later + dt.timedelta(days=1), found=RateBracket(None, None, "cut off")
    )
    found = rate(silent, newer, measurement())
    assert isinstance(found, MeasuredRate)
    assert (found.requests_per_second, found.when) == (3.0, later)
    missed = measurement(when=later, found=RateBracket(None, 0.5, "none", "0.5 requests/s miss it"))
    assert rate(measurement(), missed) == (
        "llama does not meet its contract even at the lowest rate that was measured: "
        "0.5 requests/s miss it"
    )


def test_a_result_of_other_settings_is_never_used_and_the_sentence_names_what_differs() -> None:
    now = replace(
        SUBJECT,
        release="0.33.0-ffff",
        arguments=tuple(each.replace("128", "256") for each in SUBJECT.arguments),
    )
    assert rate(measurement(), subject=now) == (
        "llama was measured on 2026-11-20 with different settings: release 0.32.0-1a2b3c4d5e, now "
        "0.33.0-ffff; arguments --max-num-seqs 128, now --max-num-seqs 256"
    )
    more = replace(SUBJECT, arguments=(*SUBJECT.arguments, "--enforce-eager"))
    assert "arguments none of these, now --enforce-eager" in str(rate(measurement(), subject=more))


def test_a_result_for_another_contract_or_of_a_closed_loop_or_model_is_never_used() -> None:
    other = replace(CONTRACT, ttft_seconds=0.2, e2e_seconds=3.0)
    assert isinstance(rate(measurement(), contract=CONTRACT), MeasuredRate)
    assert rate(measurement(), contract=other) == (
        "llama was measured on 2026-11-20 for a different contract: ttft_seconds 0.5, now 0.2; "
        "e2e_seconds none, now 3.0"
    )
    for found in (measurement(loop="closed"), measurement(model="qwen")):
        assert "run `gpufleet measure`" in str(rate(found))
    assert "run `gpufleet measure`" in str(rate())
    silent = measurement(found=RateBracket(None, None, "cut off", "it was stopped"))
    assert "found no rate: it was stopped" in str(rate(silent))


def test_a_result_from_a_clock_that_is_ahead_has_no_negative_age() -> None:
    found = rate(measurement(when=NOW + dt.timedelta(minutes=5)))
    assert isinstance(found, MeasuredRate)
    assert found.age_seconds == 0


def test_a_contract_is_stored_as_it_is(tmp_path: Path) -> None:
    found = measurement(contract=Contract(e2e_seconds=2.0, share=0.9, confidence=0.99))
    document = json.loads(write(found, tmp_path).read_text())
    assert document["contract"] == {
        "ttft_seconds": None, "itl_seconds": None, "e2e_seconds": 2.0, "share": 0.9,
        "confidence": 0.99,
    }  # fmt: skip
    assert document["when"] == "2026-11-20T12:30:05Z"
    assert document["fingerprint"] == SUBJECT.fingerprint.digest
