"""A gate lets pass what is as before, stops what is worse, and says what it cannot know."""

from __future__ import annotations

import datetime as dt
import json
import math
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.checks.finding import Finding, GpuId, Report, Severity
from gpufleet.monitoring.rules import files
from gpufleet.settings.monitoring_settings import AlertChange
from gpufleet.settings.upgrade_settings import Gates
from gpufleet.upgrade.gates import baseline, gates
from gpufleet.upgrade.gates.baseline import (
    ITL,
    TTFT,
    Alert,
    Alerts,
    Answer,
    Counters,
    Findings,
    Question,
    Reading,
    Traffic,
    answers_as_json,
    answers_from_json,
)
from gpufleet.upgrade.gates.gates import Verdict
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.monitoring.programs import program

RECORDED = ROOT / "tests/unit/monitoring/recorded"
RELEASES = ("0.28.0", "0.30.0", "0.32.0")
INF = math.inf
PROMPT, OTHER = "The capital of France is", "1, 2, 3,"

# -- the quantile ----------------------------------------------------------------------------------

bounds = st.lists(
    st.sampled_from([0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0]),
    min_size=1,
    max_size=8,
    unique=True,
).map(sorted)


@st.composite
def histograms(draw: st.DrawFn) -> dict[float, float]:
    """Cumulative counts with at least one observation, as a server serves them."""
    found: dict[float, float] = {}
    total = 0
    for at in [*draw(bounds), INF]:
        total += draw(st.integers(0, 50) | st.just(0))
        found[at] = float(total)
    if total == 0:
        found = {at: count + 1 for at, count in found.items()}
    return found


@settings(
    max_examples=2,  # each is thirty histograms, asked at once
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(found=st.lists(histograms(), min_size=30, max_size=30), q=st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_what_prometheus_gives(
    tmp_path: Path, found: list[dict[float, float]], q: float
) -> None:
    series = [
        {"series": f'h_bucket{{case="{case}",le="{_le(at)}"}}', "values": f"{count:g}"}
        for case, histogram in enumerate(found)
        for at, count in histogram.items()
    ]
    expressions = [
        {
            "expr": f'abs(histogram_quantile({q}, h_bucket{{case="{case}"}}) - '
            f"{gates.quantile(q, histogram)!r}) <= bool 1e-9",
            "eval_time": "0s",
            "exp_samples": [{"labels": f'{{case="{case}"}}', "value": 1}],
        }
        for case, histogram in enumerate(found)
    ]
    file = tmp_path / "quantile.test.yml"
    file.write_text(
        yaml.safe_dump(
            {
                "rule_files": [],
                "evaluation_interval": "1m",
                "tests": [
                    {"interval": "1m", "input_series": series, "promql_expr_test": expressions}
                ],
            }
        )
    )
    promtool = program("prometheus", "usr/bin/promtool")
    done = subprocess.run(
        [promtool, "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("histogram", [{}, {INF: 3.0}, {0.1: 0.0, INF: 0.0}, {0.1: 3.0, 0.2: 3.0}])
def test_of_nothing_and_of_half_a_histogram_there_is_no_quantile(
    histogram: dict[float, float],
) -> None:
    assert math.isnan(gates.quantile(0.99, histogram))


# -- what servers count ----------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_the_counters_of_a_real_server_are_found(release: str) -> None:
    """Compared with what `grep` finds in the recording, as its README says."""
    text = (RECORDED / f"vllm-{release}.txt").read_text()
    found = baseline.counters(text)

    def grep(start: str) -> list[float]:
        return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(start)]

    assert [found.started] == grep("process_start_time_seconds ")
    assert [found.latencies[TTFT][INF]] == grep("vllm:time_to_first_token_seconds_count")
    assert [found.latencies[ITL][INF]] == grep("vllm:inter_token_latency_seconds_count")
    assert list((found.finished or {}).values()) == grep("vllm:request_success_total{")
    assert found.answered == {"2xx": 11.0, "4xx": 2.0, "5xx": 3.0}


def test_the_counters_of_a_real_sglang_are_found() -> None:
    found = baseline.counters((RECORDED / "sglang-0.5.23.txt").read_text())

    assert found.finished is None, "it counts finished requests without their reasons"
    assert found.answered == {"2xx": 23.0, "4xx": 2.0}, "what is no request of clients is left out"
    assert found.latencies[TTFT][INF] > 0
    assert found.latencies[ITL][INF] > 0


def test_an_older_release_has_the_time_between_tokens_under_its_old_name() -> None:
    text = (RECORDED / "vllm-0.32.0.txt").read_text()
    older = text.replace("inter_token_latency_seconds", "time_per_output_token_seconds")

    assert baseline.counters(older).latencies == baseline.counters(text).latencies


def test_what_a_server_did_is_the_difference_of_two_readings() -> None:
    text = (RECORDED / "vllm-0.32.0.txt").read_text()
    once = baseline.counters(text)
    length = 'finished_reason="length",model_name="tiny"}'
    after = baseline.counters(text.replace(f"{length} 9.0", f"{length} 12.0"))
    found = baseline.traffic_between(Reading(10, {"a": once}), Reading(40, {"a": after}))

    assert found.seconds == 30
    assert found.finished == {"stop": 0, "length": 3, "abort": 0, "error": 0, "repetition": 0}
    assert (found.requests, found.restarted, found.unread) == (0, (), ())


@pytest.mark.parametrize("says", [True, False], ids=["by its start", "by counters that fell"])
def test_a_server_that_was_started_in_between_counts_from_nothing(says: bool) -> None:
    busy = Counters(100.0 if says else None, {TTFT: {0.1: 90.0, INF: 99.0}}, {"stop": 99.0}, None)
    fresh = Counters(200.0 if says else None, {TTFT: {0.1: 3.0, INF: 4.0}}, {"stop": 4.0}, None)
    found = baseline.traffic_between(Reading(0, {"a": busy}), Reading(9, {"a": fresh}))

    assert found.restarted == ("a",)
    assert found.requests == 4
    assert found.finished == {"stop": 4.0}


def test_a_start_that_is_read_to_a_tick_of_the_clock_is_the_same_start() -> None:
    once = Counters(100.0, {TTFT: {INF: 9.0}}, {"stop": 9.0}, None)
    again = Counters(100.01, {TTFT: {INF: 9.0}}, {"stop": 9.0}, None)

    assert (
        baseline.traffic_between(Reading(0, {"a": once}), Reading(9, {"a": again})).restarted == ()
    )


def test_a_look_at_counters_alone_has_its_whole_time() -> None:
    """Prompts take longer; none takes nothing away."""
    counters = baseline.seconds([Question("a-0", ("n",))])

    assert counters == 2 * baseline.LOOK_SECONDS
    assert baseline.seconds([]) == counters


def test_servers_of_a_replica_are_added_up_and_one_that_is_silent_is_named() -> None:
    one = Counters(1.0, {TTFT: {0.1: 1.0, INF: 2.0}}, {"stop": 2.0}, {"2xx": 2.0})
    two = Counters(1.0, {TTFT: {0.1: 5.0, INF: 5.0}}, {"stop": 5.0}, {"2xx": 4.0, "5xx": 1.0})
    found = baseline.traffic_between(
        None, Reading(0, {"a": one, "b": two, "c": "Connection refused"})
    )

    assert found.latencies == {TTFT: {0.1: 6.0, INF: 7.0}}
    assert found.answered == {"2xx": 6.0, "5xx": 1.0}
    assert len(found.unread) == 1
    assert "Connection refused" in found.unread[0]


# -- as quickly as before --------------------------------------------------------------------------

TTFT_BOUNDS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, INF)


def observed(seconds: Iterable[float], bounds: Iterable[float] = TTFT_BOUNDS) -> dict[float, float]:
    """Return the histogram that a server makes of these times."""
    times = list(seconds)
    return {at: float(sum(time <= at for time in times)) for at in bounds}


def did(
    ttft: Iterable[float] = [0.03] * 100, errors: float = 0, itl: Iterable[float] = [0.015] * 500
) -> Traffic:
    """Return a window with requests that took so long."""
    times = observed(ttft)
    total = times[INF]
    return Traffic(
        30,
        {TTFT: times, ITL: observed(itl)},
        {"stop": total - errors, "error": errors},
        {"2xx": total - errors, "5xx": errors},
    )


WANTED = Gates()


def test_the_same_traffic_passes_and_its_numbers_are_kept() -> None:
    verdict = gates.traffic(did(), did(), WANTED)

    assert verdict.passed is True
    assert verdict.reasons == ()
    assert verdict.seen["ttft_p99_before"] == verdict.seen["ttft_p99_after"]
    assert 0.02 < verdict.seen["ttft_p99_after"] <= 0.04


@pytest.mark.parametrize("which", ["ttft", "itl"])
def test_a_p99_of_many_times_as_much_fails_with_both_numbers(which: str) -> None:
    quick: dict[str, Any] = {which: [0.03] * 200}
    slow: dict[str, Any] = {which: [0.4] * 200}
    verdict = gates.traffic(did(**quick), did(**slow), WANTED)

    assert verdict.passed is False
    (reason,) = verdict.reasons
    assert "latency_ratio" in reason
    assert " ms" in reason


def test_slow_requests_that_are_fewer_than_one_in_a_hundred_do_not_fail() -> None:
    assert gates.traffic(did([0.03] * 1000), did([0.03] * 995 + [2.0] * 5), WANTED).passed is True
    assert gates.traffic(did([0.03] * 1000), did([0.03] * 985 + [2.0] * 15), WANTED).passed is False


def test_a_p99_in_the_next_bucket_may_be_the_same_time_and_never_fails() -> None:
    """0.099 s and 0.101 s are told apart by nobody: interpolated they are 0.1 s and 0.25 s."""
    before, after = did([0.099] * 100), did([0.101] * 100)

    assert gates.quantile(0.99, after.latencies[TTFT]) > 2 * 0.99 * gates.quantile(
        0.99, before.latencies[TTFT]
    )
    assert gates.traffic(before, after, WANTED).passed is True
    assert gates.traffic(before, did([0.3] * 100), WANTED).passed is False


def test_one_slow_request_alone_does_not_fail() -> None:
    """Of 60 requests it is the p99."""
    assert gates.traffic(did([0.03] * 60), did([0.03] * 59 + [2.0]), WANTED).passed is True
    assert gates.traffic(did([0.03] * 60), did([0.03] * 58 + [2.0] * 2), WANTED).passed is False


def test_times_below_a_second_are_said_in_milliseconds_and_longer_ones_in_seconds() -> None:
    verdict = gates.traffic(did([0.03] * 100), did([0.03] * 98 + [1.2] * 2), WANTED)

    assert "the p99 is 1.75 s and was 39.8 ms before the change" in verdict.reasons[0]


def test_quicker_is_no_fault() -> None:
    assert gates.traffic(did([0.4] * 100), did([0.009] * 100), WANTED).passed is True


@pytest.mark.parametrize("few", ["before", "after"])
def test_of_few_requests_no_time_is_judged_which_is_said(few: str) -> None:
    slow, fast = (
        did([2.0] * (49 if few == "after" else 100)),
        did([0.03] * (49 if few == "before" else 100)),
    )
    verdict = gates.traffic(fast, slow, WANTED)

    assert verdict.passed is True
    assert len([each for each in verdict.reasons if "did not compare" in each]) == 2


def test_errors_are_judged_however_few_requests_there_are() -> None:
    verdict = gates.traffic(did(), did([0.03] * 10, errors=1), WANTED)

    assert verdict.passed is False
    assert any("5xx" in each for each in verdict.reasons)


def test_errors_of_before_are_allowed_and_more_by_the_ratio() -> None:
    before = did([0.03] * 100, errors=5)

    assert gates.traffic(before, did([0.03] * 100, errors=5), WANTED).passed is True
    assert gates.traffic(before, did([0.03] * 100, errors=7), WANTED).passed is False
    lenient = WANTED.model_copy(update={"error_ratio": 0.02})
    assert gates.traffic(before, did([0.03] * 100, errors=7), lenient).passed is True
    assert gates.traffic(before, did([0.03] * 100, errors=8), lenient).passed is False


def test_counters_that_cannot_be_read_are_no_pass() -> None:
    unread = replace(did(), unread=("a: HTTP 503",))

    assert gates.traffic(did(), unread, WANTED).passed is None
    assert gates.traffic(unread, did(), WANTED).passed is None
    assert gates.traffic(did(), Traffic(30), WANTED).passed is None


def test_a_model_that_was_not_there_before_is_judged_by_its_errors_alone() -> None:
    nothing = Traffic(0, {}, {}, {})

    assert gates.traffic(nothing, did([5.0] * 100), WANTED).passed is True
    assert gates.traffic(nothing, did(errors=1), WANTED).passed is False


def test_a_server_that_started_again_while_it_was_watched_fails() -> None:
    """It served requests again and died: whatever its few requests after that took."""
    assert gates.traffic(did(), replace(did(), restarted=("a",)), WANTED).passed is False


def test_releases_with_other_buckets_are_compared_by_those_that_both_have() -> None:
    finer = (*TTFT_BOUNDS[:-1], 0.03, 0.05, INF)
    after = replace(
        did(), latencies={**did().latencies, TTFT: observed([0.03] * 100, sorted(finer))}
    )
    verdict = gates.traffic(did(), after, WANTED)

    assert verdict.passed is True
    assert verdict.seen["ttft_p99_after"] == verdict.seen["ttft_p99_before"]


# -- the same answers ------------------------------------------------------------------------------


def says(*tokens: int) -> Answer:
    return Answer(" ".join(map(str, tokens)), tokens)


STABLE = {PROMPT: (says(1, 2, 3, 4), says(1, 2, 3, 4))}


def vector(*numbers: float) -> Answer:
    return Answer(f"{len(numbers)} numbers", kind="embed", numbers=numbers)


def told(kind: str, text: str) -> Answer:
    return Answer(text, kind=kind)


@each_row(
    ("before", "after", "passed", "says"),
    [
        (vector(0.6, 0.8), vector(0.6, 0.8), True, ""),
        (vector(0.6, 0.8), vector(0.61, 0.79), True, ""),  # a cosine of 0.99990
        (vector(0.6, 0.8), vector(0.7, 0.71), False, "from before the change is 0.990"),
        (vector(0.6, 0.8), vector(-0.6, -0.8), False, "is -1, but at least 0.999 is required"),
        (vector(0.6, 0.8), vector(0.6, 0.8, 0.0), False, "3 numbers, but returned 2"),
        (told("classify", "spam"), told("classify", "spam"), True, ""),
        (told("classify", "spam"), told("classify", "ham"), False,
         '"ham", but it had the label "spam" before'),
        (told("rerank", "1"), told("rerank", "1"), True, ""),
        (told("rerank", "1"), told("rerank", "2"), False, 'rank "2" in the reranker\'s order'),
        (told("transcribe", " a b"), told("transcribe", "a  b"), True, ""),
        (told("transcribe", ""), told("transcribe", ""), True, ""),
        (told("transcribe", "a"), told("transcribe", "b"), False, 'transcribed as "b"'),
        (Answer("x", kind="reward", numbers=(0.82,)),
         Answer("x", kind="reward", numbers=(0.823,)), True, ""),
        (Answer("x", kind="reward", numbers=(0.82,)),
         Answer("x", kind="reward", numbers=(-0.82,)), False, "a different embedding"),
        (says(1, 2), vector(0.6, 0.8), None,
         "of kind generate answered the prompt before the change, and a model of kind emb"),
    ],
)  # fmt: skip
def test_answers_of_other_kinds_are_compared_as_such(
    before: Answer, after: Answer, passed: bool | None, says: str
) -> None:
    verdict = gates.golden({PROMPT: (before, before)}, {PROMPT: (after,)}, 1.0)

    assert verdict.passed is passed
    assert says in " ".join(verdict.reasons)


def test_any_vector_passes_where_no_cosine_is_asked_for() -> None:
    was, now = {PROMPT: (vector(1.0, 0.0),) * 2}, {PROMPT: (vector(0.0, 1.0),)}
    assert gates.golden(was, now, 1.0, 0).passed is True
    assert gates.golden(was, now, 0).passed is False  # `same` is of tokens


def test_a_vector_that_was_not_stable_before_is_no_measure() -> None:
    was = {PROMPT: (vector(1.0, 0.0), vector(0.8, 0.6))}
    assert gates.golden(was, {PROMPT: (vector(1.0, 0.0),)}, 1.0).passed is None


def test_answers_of_older_journals_are_those_of_models_that_complete_text() -> None:
    old = {PROMPT: [{"text": "1 2", "tokens": [1, 2], "error": "", "asked": True}]}
    assert answers_from_json(old) == {PROMPT: (says(1, 2),)}
    new = {PROMPT: (vector(0.5, 0.25),)}
    assert answers_from_json(json.loads(json.dumps(answers_as_json(new)))) == new


def test_numbers_that_a_node_makes_up_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        Answer.from_json({"numbers": [float("nan")]})


def test_the_same_tokens_pass() -> None:
    verdict = gates.golden(STABLE, {PROMPT: (says(1, 2, 3, 4),)}, 1.0)

    assert (verdict.passed, verdict.reasons, verdict.seen) == (True, (), {"golden_same": 1.0})


@each_row(
    ("answer", "same", "passed"),
    [
        pytest.param(says(1, 2, 3, 9), 1.0, False, id="one of four differs"),
        pytest.param(says(1, 2, 3, 9), 0.75, True, id="as much as is asked for"),
        pytest.param(says(9, 2, 3, 4), 0.75, False, id="the first one counts most"),
        pytest.param(says(1, 2, 3), 0.76, False, id="shorter"),
        pytest.param(says(1, 2, 3, 4, 5), 0.81, False, id="longer"),
        pytest.param(says(1, 2, 3, 4, 5), 0.8, True, id="longer, and enough"),
        pytest.param(says(), 0.01, False, id="empty"),
        pytest.param(says(), 0.0, False, id="empty where an answer is enough"),
        pytest.param(says(7, 7, 7), 0.0, True, id="any answer is enough"),
        pytest.param(Answer(error="HTTP 500: x"), 0.0, False, id="an error"),
        pytest.param(Answer(error="timed out"), 1.0, False, id="no answer"),
    ],
)
def test_an_answer_is_judged_by_its_tokens_from_the_first_one_on(
    answer: Answer, same: float, passed: bool
) -> None:
    verdict = gates.golden(STABLE, {PROMPT: (answer,)}, same)

    assert verdict.passed is passed
    assert bool(verdict.reasons) is not passed


def test_one_of_several_servers_that_answers_wrong_fails() -> None:
    after = {PROMPT: (says(1, 2, 3, 4), says(5, 6, 7, 8))}

    assert gates.golden(STABLE, after, 1.0).passed is False


def test_a_prompt_whose_answer_was_not_stable_is_said_and_the_others_judge() -> None:
    loose = {OTHER: (says(1, 2), says(1, 3))}
    after = {PROMPT: (says(1, 2, 3, 4),), OTHER: (says(8, 8),)}
    verdict = gates.golden({**STABLE, **loose}, after, 1.0)

    assert verdict.passed is True
    assert any(OTHER in each and "cannot be compared" in each for each in verdict.reasons)
    assert gates.golden({**STABLE, **loose}, {**after, PROMPT: (says(4),)}, 1.0).passed is False


@each_row(
    "before",
    [
        pytest.param((says(1, 2), says(1, 3)), id="unstable"),
        pytest.param((says(1, 2),), id="asked once"),
        pytest.param((), id="not asked"),
        pytest.param((says(), says()), id="empty before"),
        pytest.param((Answer(error="x"), Answer(error="x")), id="an error before"),
    ],
)
def test_without_any_measure_nothing_is_known_until_an_answer_is_enough(
    before: tuple[Answer, ...],
) -> None:
    after = {PROMPT: (says(1, 2),)}
    verdict = gates.golden({PROMPT: before}, after, 1.0)

    assert verdict.passed is None
    assert "golden.same: 0" in verdict.reasons[-1]
    assert gates.golden({PROMPT: before}, after, 0.0).passed is True


def test_a_model_that_is_stable_in_so_much_is_held_to_that() -> None:
    """Its own answers have 3 of 4 tokens in common, so 0.75 can be asked for and 1 cannot."""
    before = {PROMPT: (says(1, 2, 3, 4), says(1, 2, 3, 5))}

    assert gates.golden(before, {PROMPT: (says(1, 2, 3, 6),)}, 0.75).passed is True
    assert gates.golden(before, {PROMPT: (says(1, 2, 9, 4),)}, 0.75).passed is False
    assert gates.golden(before, {PROMPT: (says(1, 2, 3, 4),)}, 1.0).passed is None


def test_a_release_that_tells_no_tokens_is_judged_by_its_text() -> None:
    texts = {PROMPT: (Answer("Paris, of course"), Answer("Paris, of course"))}

    assert gates.golden(texts, {PROMPT: (Answer("Paris, of course", (4, 5)),)}, 1.0).passed is True
    assert gates.golden(texts, {PROMPT: (Answer("Berlin"),)}, 1.0).passed is False


def test_a_node_that_did_not_answer_says_nothing_of_its_server() -> None:
    silent = Answer(error="gpu-01: no answer within 100 s", asked=False)

    assert gates.golden(STABLE, {PROMPT: (silent,)}, 1.0).passed is None
    assert gates.golden(STABLE, {PROMPT: (silent, Answer(error="HTTP 500"))}, 1.0).passed is False


def test_a_prompt_that_nobody_put_is_not_known() -> None:
    assert gates.golden(STABLE, {}, 1.0).passed is None


def test_without_prompts_answers_are_not_judged_which_is_said() -> None:
    verdict = gates.golden({}, {}, 1.0)

    assert verdict.passed is True
    assert verdict.reasons


# -- findings and alerts ---------------------------------------------------------------------------


def finding(severity: Severity, check: str = "xid", **also: Any) -> Finding:
    return Finding(check, "gpu-01", severity, "an Xid 79", **also)


def checked(*found: Finding) -> Findings:
    return Findings.unaccepted(Report(found, {}, ("gpu-01",)))


@each_row(
    ("before", "after", "passed"),
    [
        ([], [], True),
        ([], [finding(Severity.WARN)], True),
        ([], [finding(Severity.BLOCK)], False),
        ([], [finding(Severity.UNKNOWN)], None),
        ([], [finding(Severity.BLOCK, accepted="since spring")], True),
        ([finding(Severity.BLOCK)], [finding(Severity.BLOCK)], True),
        ([finding(Severity.BLOCK)], [finding(Severity.UNKNOWN)], True),
        ([finding(Severity.UNKNOWN)], [finding(Severity.BLOCK)], False),
        ([finding(Severity.BLOCK)], [finding(Severity.BLOCK, gpu=GpuId(1, "GPU-b"))], False),
        (
            [finding(Severity.BLOCK, gpu=GpuId(1, "GPU-b"))],
            [finding(Severity.BLOCK, gpu=GpuId(0, "GPU-b"))],
            True,
        ),
    ],
)
def test_findings_of_before_are_allowed_and_new_ones_are_not(
    before: list[Finding], after: list[Finding], passed: bool | None
) -> None:
    """A GPU is the same one by its UUID: a reboot may give it another number."""
    assert gates.findings(checked(*before), checked(*after)).passed is passed


def test_a_node_that_was_not_checked_again_is_not_known() -> None:
    assert gates.findings(checked(), Findings()).passed is None


def alert(name: str = "VllmFrozen", node: str = "gpu-01") -> Alert:
    return Alert(name, node, (("alertname", name), ("instance", node)))


HOMES = ("monitor-01",)


@each_row(
    ("before", "after", "passed"),
    [
        (Alerts(), Alerts(), True),
        (Alerts(HOMES), Alerts(HOMES), True),
        (Alerts(HOMES), Alerts(HOMES, (alert(),)), False),
        (Alerts(HOMES, (alert(),)), Alerts(HOMES, (alert(),)), True),
        (Alerts(HOMES, (alert(),)), Alerts(HOMES, (alert("Other"),)), False),
        (Alerts(HOMES), Alerts(HOMES, (alert(node="gpu-09"),)), True),
        (Alerts(HOMES), Alerts(HOMES, (), ("monitor-01: no answer",)), None),
        (Alerts(HOMES, (), ("monitor-01: no answer",)), Alerts(HOMES), None),
        (Alerts(HOMES, (), ("no answer",)), Alerts(HOMES, (alert(),)), False),
        (Alerts(), Alerts(HOMES), None),
    ],
)
def test_alerts_about_the_nodes_that_did_not_fire_before_stop(
    before: Alerts, after: Alerts, passed: bool | None
) -> None:
    assert gates.alerts(before, after, {"gpu-01"}).passed is passed


def test_a_gate_whose_source_is_silent_before_the_change_is_said_before_it() -> None:
    """Whatever comes after, the gate is not known: each wave would be out, and be taken back."""
    silent = Alerts(HOMES, (), ("monitor-01: Alertmanager did not report its alerts",))
    for after in (Alerts(HOMES), silent, Alerts(HOMES, (alert(),))):
        assert not gates.alerts(silent, after, {"gpu-01"}).passed
    problem, what = gates.never_passed(silent, Gates())
    assert problem == silent.problems[0]
    assert "write `alerts: false` under `upgrade.gates`" in what
    assert gates.never_passed(silent, Gates(alerts=False)) == ()
    assert gates.never_passed(Alerts(HOMES, (alert(),)), Gates()) == ()
    assert gates.never_passed(Alerts(), Gates()) == ()


DEAD = Answer(error="gpu-01: nothing answers on port 8000")
UNREAD = Traffic(30, unread=("gpu-01: its counters are unknown: nothing answers on port 8000",))


@each_row(
    ("answers", "traffic", "same", "sentence"),
    [
        ({PROMPT: (says(1, 2), says(1, 2))}, "did", 1.0, ""),
        ({}, "did", 1.0, ""),
        ({}, "new", 1.0, ""),
        (
            {PROMPT: (DEAD, DEAD)},
            "did",
            1.0,
            "cannot be compared: the prompt got no answer before the change either",
        ),
        ({PROMPT: (DEAD, DEAD)}, "did", 0.0, ""),
        (
            {PROMPT: (says(1), says(2))},
            "did",
            1.0,
            "had only the first 0 % in common, but 100 % is required",
        ),
        ({PROMPT: (says(1), says(2)), OTHER: (says(1), says(1))}, "did", 1.0, ""),
        ({PROMPT: (says(1, 2), says(1, 2))}, "unread", 1.0, "its counters are unknown: nothing"),
    ],
)
def test_a_gate_that_cannot_pass_is_known_from_the_baseline(
    answers: dict[str, tuple[Answer, ...]], traffic: str, same: float, sentence: str
) -> None:
    """What it says is what the gate itself says later, of the best that can come after."""
    before = {"did": did(), "unread": UNREAD, "new": Traffic(0, {}, {}, {})}[traffic]
    said = gates.cannot_pass(answers, before, WANTED, same=same, cosine=0.999)

    assert (sentence in " ".join(said)) if sentence else said == ()
    after = {
        prompt: tuple(says(7) if each.error else each for each in was)
        for prompt, was in answers.items()
    }
    later = gates.combine(
        (gates.golden(answers, after, same), gates.traffic(before, did(), WANTED))
    )
    assert (later.passed is True) == (not sentence), later.reasons


def test_a_replica_that_does_not_answer_is_named_before_the_first_drain() -> None:
    (said,) = gates.silent_replicas({"llama-0": "its unit is failed on gpu-01"})

    assert said.startswith("llama-0: its unit is failed on gpu-01. ")
    assert "the wave will be changed and rolled back" in said
    assert "Repair the replica first with deploys/vllm.py" in said


@each_row(
    ("since", "holds", "passed"),
    [
        ("2026-11-22T17:46:44.158Z", {"UnitFailed": 300}, True),  # so since 17:41:44
        ("2026-11-22T17:46:44.158Z", {"UnitFailed": 60}, False),
        ("2026-11-22T17:46:44.158Z", {"Other": 300}, False),
        ("2026-11-22T17:46:44.158Z", None, False),
        ("", {"UnitFailed": 300}, False),
        ("2026-11-22T17:46:44.158", {"UnitFailed": 300}, False),
    ],
)
def test_an_alert_that_was_pending_before_the_change_is_not_of_the_change(
    since: str, holds: dict[str, float] | None, passed: bool
) -> None:
    """It fires when its reason has held for a while: only for alerts of ours is known how long."""
    first = dt.datetime(2026, 11, 22, 17, 45, 10, tzinfo=dt.UTC).timestamp()
    fires = replace(alert("UnitFailed"), since=since)
    found = gates.alerts(Alerts(HOMES, at=first), Alerts(HOMES, (fires,)), {"gpu-01"}, holds)

    assert found.passed is passed
    assert any("its cause is older than the change" in each for each in found.reasons) is passed


def test_how_long_a_reason_has_held_is_as_the_operator_has_it() -> None:
    """Of several monitoring nodes the shortest time counts: its alert comes first."""
    shipped = files.hold_seconds()
    assert shipped["UnitFailed"] == 300
    changed = [{"UnitFailed": AlertChange(for_seconds=30)}, {"UnitFailed": AlertChange()}]
    assert files.hold_seconds(changed) == shipped | {"UnitFailed": 30}


# -- together, and kept ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "together"),
    [
        ([], True),
        ([True, True], True),
        ([True, None], None),
        ([None, False, True], False),
    ],
)
def test_the_worst_of_several_verdicts_holds(
    said: list[bool | None], together: bool | None
) -> None:
    found = gates.combine(Verdict(each, (str(each),)) for each in said)

    assert found.passed is together
    assert len(found.reasons) == len(said)


def test_what_a_journal_keeps_judges_as_what_was_seen() -> None:
    """Through JSON, which has no infinity and no whole numbers as keys."""
    kept = json.loads(
        json.dumps(
            {
                "traffic": did().as_json(),
                "answers": baseline.answers_as_json(STABLE),
                "alerts": Alerts(HOMES, (alert(),), at=5.5).as_json(),
                "findings": checked(finding(Severity.BLOCK)).as_json(),
            },
            allow_nan=False,
        )
    )

    assert Traffic.from_json(kept["traffic"]) == did()
    assert baseline.answers_from_json(kept["answers"]) == STABLE
    assert Alerts.from_json(kept["alerts"]) == Alerts(HOMES, (alert(),), at=5.5)
    assert Findings.from_json(kept["findings"]) == checked(finding(Severity.BLOCK))


def _le(at: float) -> str:
    return "+Inf" if math.isinf(at) else repr(at)
