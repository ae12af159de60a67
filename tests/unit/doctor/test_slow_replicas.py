"""A replica that is slow is named with what its metrics, its GPUs and its siblings show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet.checks.finding import Finding, GpuId, Report, Severity
from gpufleet.doctor.fleet_diagnosis import Impact
from gpufleet.doctor.fleet_problems import diagnose
from gpufleet.doctor.observations import FleetObservations
from gpufleet.doctor.replica_speed import MEASURES, replica_speeds
from gpufleet.engines.engine import line_beginnings
from gpufleet.serving.rank_status import Health, RankStatus
from gpufleet.serving.status import FleetStatus, ReplicaStatus
from gpufleet.settings.monitoring_settings import Objectives
from tests.support.checkout import ROOT
from tests.support.rows import each_row

NOW = 1_795_290_000.0
BOUNDS = (0.01, 0.05, 0.1, 1.0)
PROMISED = Objectives(itl_p99_seconds=0.05, ttft_p99_seconds=1)
SLOW_ITL = (0, 0, 900, 1000)
"""Tokens at or below each bound: a tenth took longer than 0.1 s."""
FAST_ITL = (1000, 1000, 1000, 1000)


def text(itl=FAST_ITL, ttft=(50, 50, 50, 50), prompts=(50, 50), *, e2e=(0, 0, 0, 0), **gauges):
    """What one look at /metrics has."""
    values = {"running": 8, "waiting": 0, "kv": 0.5, "preempted": 0, **gauges}
    rows = [
        *_buckets("vllm:inter_token_latency_seconds", BOUNDS, itl),
        *_buckets("vllm:time_to_first_token_seconds", BOUNDS, ttft),
        *_buckets("vllm:request_prompt_tokens", (8000.0,), prompts),
        *_buckets("vllm:e2e_request_latency_seconds", BOUNDS, e2e),
        f'vllm:num_preemptions_total{{engine="0"}} {values["preempted"]}',
        f'vllm:num_requests_running{{engine="0"}} {values["running"]}',
        f'vllm:num_requests_waiting{{engine="0"}} {values["waiting"]}',
        f'vllm:kv_cache_usage_perc{{engine="0"}} {values["kv"]}',
    ]
    return "\n".join(rows)


def _buckets(name, bounds, counts):
    for bound, count in zip((*bounds, "+Inf"), (*counts, counts[-1]), strict=False):
        yield f'{name}_bucket{{engine="0",le="{bound}"}} {count}'


NOTHING = text((0,) * 4, (0,) * 4, (0, 0))


def speeds(**replicas):
    """Speeds of replicas by what their last look has; `tiny_0` is tiny-0."""
    said = {
        name.replace("_", "-"): {
            "seconds": 3.0,
            "servers": {"http://x": [{"text": NOTHING}, {"text": each}]},
        }
        for name, each in replicas.items()
    }
    return replica_speeds({"gpu-01": {"schema": 1, "replicas": said}})


def problems(known, findings=(), objectives=PROMISED):
    names = sorted({"tiny-0", *known})
    replicas = tuple(
        ReplicaStatus(
            "tiny",
            int(name[-1]),
            (RankStatus(f"gpu-0{int(name[-1]) + 1}", 0, Health.SERVES, gpus=(f"GPU-{name[-1]}",)),),
            Health.SERVES,
            (),
        )
        for name in names
    )
    observed = FleetObservations(
        FleetStatus(replicas, {}),
        Report(tuple(findings), {}, ("gpu-01", "gpu-02", "gpu-03")),
        speeds=known,
        objectives={"tiny": objectives},
    )
    return diagnose(observed, NOW, "INVENTORY")


def test_a_replica_within_its_objectives_is_no_problem():
    assert problems(speeds(tiny_0=text())).problems == ()


@each_row(
    ("look", "cause", "setting"),
    [
        (text(SLOW_ITL, preempted=3, waiting=2), "KV cache is too small", "max-num-seqs"),
        (text(SLOW_ITL, kv=0.97, waiting=2), "KV cache is too small", "serving.tiny.context"),
        (
            text(SLOW_ITL, waiting=40),
            "requests wait although the KV",
            "serving.tiny.replicas",
        ),
        (text(SLOW_ITL, prompts=(40, 50)), "20% of the prompts", "max-num-batched-tokens"),
        (text(ttft=(0, 0, 0, 0), waiting=40), "", ""),
        (text(ttft=(0, 0, 0, 50), waiting=40), "", ""),
    ],
    ids=["preempted", "KV full", "queue", "long prompts", "none ended", "within the bucket"],
)
def test_what_makes_it_slow_is_named_with_the_setting_to_change(look, cause, setting):
    found = problems(speeds(tiny_0=look)).problems
    if not cause:
        assert found == ()
        return
    (one,) = found
    assert (one.subject, one.impact) == ("tiny-0 (slow)", Impact.RISK)
    assert "p99 ITL is above 100 ms, the objective is 50 ms" in one.evidence
    assert cause in one.cause
    assert setting in one.do


def test_a_time_to_first_token_above_the_last_bound_is_missed():
    look = text(ttft=(0, 0, 0, 0)).replace(
        'time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 0',
        'time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 50',
    )
    (one,) = problems(speeds(tiny_0=look)).problems
    assert "p99 TTFT is above 1.0 s, the objective is 1.0 s" in one.evidence


def test_an_embedder_that_misses_its_only_objective_is_named():
    promised = Objectives(e2e_p99_seconds=0.1)
    look = text((0, 0, 0, 0), (0, 0, 0, 0), e2e=(0, 0, 10, 50), waiting=9)
    (one,) = problems(speeds(tiny_0=look), objectives=promised).problems
    assert "p99 e2e latency is above 100 ms, the objective is 100 ms" in one.evidence
    assert "serving.tiny.replicas" in one.do
    few = text((0, 0, 0, 0), (0, 0, 0, 0), e2e=(0, 0, 0, 19))
    assert problems(speeds(tiny_0=few), objectives=promised).problems == ()
    (unseen,) = problems({"tiny-0": "timeout"}, objectives=promised).unseen
    assert unseen.startswith("tiny-0: unknown whether the replica is slow: ")


def test_several_causes_are_all_named():
    (one,) = problems(speeds(tiny_0=text(SLOW_ITL, preempted=3, prompts=(10, 50)))).problems
    assert "KV cache is too small" in one.cause
    assert "80% of the prompts" in one.cause
    assert len(one.do.splitlines()) == 2


def test_a_throttled_gpu_stands_before_the_replica_that_it_slows_down():
    slow = Finding("pcie-width", "gpu-01", Severity.WARN, "8 lanes", gpu=GpuId(0, "GPU-0"))
    found = problems(speeds(tiny_0=text(SLOW_ITL)), [slow]).problems
    assert [each.subject for each in found] == ["check pcie-width on gpu-01", "tiny-0 (slow)"]
    assert found[1].because == found[0].subject
    elsewhere = replace(slow, gpu=GpuId(5, "GPU-5"))
    assert problems(speeds(tiny_0=text(SLOW_ITL)), [elsewhere]).problems[0].because == ""


def test_one_that_is_slower_than_its_siblings_under_a_like_load_is_named():
    good = text()
    known = speeds(tiny_0=text(SLOW_ITL), tiny_1=good, tiny_2=good)
    (one,) = problems(known, objectives=Objectives()).problems
    assert one.subject == "tiny-0 (slow)"
    assert "slower than the model's other replicas under a similar load, and no check" in one.cause
    busier = speeds(tiny_0=text(SLOW_ITL, running=40), tiny_1=good, tiny_2=good)
    assert problems(busier, objectives=Objectives()).problems == ()


def test_few_tokens_say_nothing():
    assert problems(speeds(tiny_0=text((0, 0, 0, 9)))).problems == ()


def test_a_server_that_was_started_between_the_looks_counts_from_0():
    said = {
        "tiny-0": {"seconds": 3, "servers": {"x": [{"text": text(FAST_ITL)}, {"text": NOTHING}]}}
    }
    found = replica_speeds({"gpu-01": {"schema": 1, "replicas": said}})["tiny-0"]
    assert found.itl.total == 0


@each_row(
    ("known", "says"),
    [
        ({"tiny-0": "gpu-01: timeout after 11 s"}, "timeout after 11 s"),
        ({}, "did not answer in time"),
        (
            speeds(tiny_0='vllm:num_requests_running{engine="0"} 1'),
            "do not contain vllm:inter_token",
        ),
    ],
)
def test_what_cannot_be_read_is_unknown_where_something_was_promised(known, says):
    found = problems(known)
    assert len(found.unseen) == 1
    assert found.unseen[0].startswith("tiny-0: unknown whether the replica is slow: ")
    assert says in found.unseen[0]
    assert problems(known, objectives=Objectives()).unseen == ()


def test_the_names_are_those_of_vllm():
    served = (ROOT / "tests/data/vllm-0.32.0.metrics").read_text()
    named = {each: line_beginnings(each) for each in MEASURES}
    assert [
        each for each, names in named.items() if not any(f"\n{n}" in served for n in names)
    ] == []


@pytest.mark.parametrize("bad", ["vllm:num_requests_running{", 'vllm:x{engine="0"} NaN'])
def test_metrics_that_are_none_are_a_sentence(bad):
    assert "invalid" in speeds(tiny_0=bad)["tiny-0"]
