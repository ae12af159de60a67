"""How busy a replica is: read from pages that vLLM really served."""

from __future__ import annotations

import datetime as dt

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpufleet.load_test.result import MeasuredRate
from gpufleet.node.topology import Gpu, Node
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.upgrade.plan.replica_load import loads, most_running, read, remarks
from gpufleet.upgrade.plan.required_replicas import required_replicas
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.upgrade.fleets import load, runs

RECORDED = ROOT / "tests/unit/monitoring/recorded"
SERVE = "/opt/vllm/releases/0.31.0-ab/bin/vllm serve"


def page(running=0.0, waiting=0.0, usage=0.0, engines=1):
    values = {
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": usage,
    }
    return "".join(
        f'vllm:{name}{{engine="{engine}",model_name="tiny"}} {value}\n'
        for name, value in values.items()
        for engine in range(engines)
    )


def tiny(number=0, *more, node="a", port=8000, release="0.31.0-ab"):
    arguments = (SERVE, "/srv/tiny", f"--port {port}", *more)
    found = runs(f"tiny-{number}", node, "GPU-0", port=port, arguments=arguments)
    return found if release == found.release else type(found)(**{**vars(found), "release": release})


SETTINGS = {
    "a": NodeSettings.model_validate(
        {"vllm": {"version": "0.32.0", "lock": "locks/x.txt", "listen": "127.0.0.1"}}
    )
}


def busy(pages, *stages, **more):
    return loads(stages or [tiny(0, "--max-num-seqs 8")], pages, {}, SETTINGS, **more)


@pytest.mark.parametrize("release", ["0.28.0", "0.30.0", "0.32.0"])
def test_a_recorded_page_says_what_its_publishers_parser_reads_in_it(release):
    text = (RECORDED / f"vllm-{release}.txt").read_text()
    theirs = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("engine") == "0"
    }

    found = read(text)

    assert found.running == theirs["vllm:num_requests_running"] == 4
    assert found.waiting == theirs["vllm:num_requests_waiting"] == 6
    assert found.kv_usage == theirs["vllm:kv_cache_usage_perc"] > 0


def test_the_engines_of_a_server_are_added_and_their_caches_averaged():
    text = page(3, 1, 0.2) + page(5, 0, 0.6).replace('engine="0"', 'engine="1"')

    found = read(text)

    assert (found.running, found.waiting) == (8, 1)
    assert found.kv_usage == pytest.approx(0.4)


@each_row(
    "text", ["", "<html>502</html>", page().replace("kv_cache", "gpu_cache"), page("NaN"), page(-1)]
)
def test_what_is_no_page_of_vllms_is_not_known_and_never_idle(text):
    assert isinstance(read(text), str)
    (found,) = busy({("a", 8000): (text,)})
    assert found.share is None
    assert "a:8000" in found.unknown


def test_a_server_that_does_not_answer_is_not_known():
    (found,) = busy({("a", 8000): "connection refused"})
    assert (found.share, found.unknown) == (None, "a:8000: connection refused")
    assert busy({})[0].share is None


def test_the_moment_counts_at_which_the_model_was_busiest():
    """tiny-0 is full first and tiny-1 later; together they were never two full replicas."""
    stages = [tiny(0, "--max-num-seqs 8"), tiny(1, "--max-num-seqs 8", port=8001)]
    pages = {
        ("a", 8000): (page(8), page(1), page(0)),
        ("a", 8001): (page(1), page(2), page(8)),
    }

    found = busy(pages, *stages)

    assert [each.running for each in found] == [8, 1]


def test_the_fuller_of_slots_and_cache_counts_and_a_queue_counts_as_load():
    assert busy({("a", 8000): (page(2, 0, 0.75),)})[0].share == 0.75
    assert busy({("a", 8000): (page(8, 4, 0.1),)})[0].share == 1.5


def test_a_replica_with_several_servers_is_the_sum_of_them():
    lines = ("--data-parallel-multi-port-external-lb", "--data-parallel-size-local 2")
    stage = tiny(0, "--data-parallel-size 2", *lines, "--max-num-seqs 8")

    (found,) = busy({("a", 8000): (page(6, 0, 0.2),), ("a", 8001): (page(2, 0, 0.4),)}, stage)

    assert (found.running, found.most_running, found.share) == (8, 16, 0.5)


def test_one_that_was_taken_out_takes_no_load_and_serves_nobody():
    (found,) = busy({("a", 8000): (page(8),)}, out={"tiny-0": "drained by ann: slow"})
    assert (found.serves, found.share) == (False, 0.0)
    assert "drained by ann" in remarks([found])[0]


# -- how many requests it takes at once ------------------------------------------------------------


def slots(*arguments, name="NVIDIA H100 80GB HBM3", mib=81559, **more):
    stage = tiny(0, *arguments, **more)
    node = Node("a", "580", (13, 0), (Gpu(0, "GPU-0", name, "0", mib, (9, 0), None),), {}, {})
    return most_running([stage], {"a": node}, SETTINGS)


def test_what_the_unit_says_counts_for_each_engine():
    assert slots("--max-num-seqs 8") == (8, False)
    assert slots("--max-num-seqs=1k") == (1000, False)
    assert slots("--max-num-seqs 8", "--data-parallel-size 4") == (32, False)


def test_of_another_engine_only_its_own_flag_counts():
    sglang = "sglang-0.5.23-1a2b3c4d5e"
    assert slots("--max-running-requests 6", release=sglang) == (6, False)
    assert slots("--max-num-seqs 8", release=sglang) == (None, False)


def test_what_nobody_wrote_is_vllms_default_for_release_and_gpu():
    """EngineArgs.get_batch_defaults: 1,024 from 70 GiB on, unless it is an A100, else 256."""
    assert slots() == (1024, True)
    assert slots(name="NVIDIA L4", mib=23034) == (256, True)
    assert slots(name="NVIDIA A100-SXM4-80GB", mib=81920) == (256, True)
    assert slots("--max-num-batched-tokens 64") == (64, True)


def test_what_cannot_be_worked_out_is_not_known():
    assert slots(release="") == (None, False)
    assert most_running([tiny()], {}, SETTINGS) == (None, False)
    assert most_running([runs("tiny-0", "a", "GPU-0", arguments=())], {}, SETTINGS)[0] is None


def test_without_slots_the_cache_counts_and_a_queue_says_that_it_is_full():
    assert load("tiny-0", most_running=None, running=5, kv_usage=0.3).share == 0.3
    assert load("tiny-0", most_running=None, waiting=1, kv_usage=0.3).share == 1.0
    assert "max-num-seqs" in remarks([load("tiny-0", most_running=None)])[0]


def finished(*counts, running=1):
    """Pages of one server, a second apart, with the requests that it has finished."""
    return tuple(
        page(running=running, usage=0.1)
        + f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {count}\n'
        for count in counts
    )


def rate(requests_per_second: float) -> MeasuredRate:
    when = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC)
    return MeasuredRate(requests_per_second, None, when, 8.5 * 86400, "replica", 1, {}, "0a1b2c3d")


def test_requests_a_second_count_against_what_the_replica_was_measured_to_carry():
    pages = {("a", 8000): finished(100, 103, 108)}

    (measured,) = busy(pages, carries={"tiny-0": rate(5.0)}, seconds=4.0)
    (unmeasured,) = busy(pages, carries={"tiny-1": rate(5.0)}, seconds=4.0)

    assert (measured.finished_per_second, measured.share) == (2.0, pytest.approx(0.4))
    assert unmeasured.share == pytest.approx(1 / 8)
    assert remarks([measured, unmeasured]) == (
        "tiny-0 finishes 2 requests/s at present. The capacity of a replica is 5 requests/s, "
        "measured on 2026-11-20 (8 days ago, fingerprint 0a1b2c3d)",
    )
    assert measured.rests_on_measurement
    assert not unmeasured.rests_on_measurement


def test_a_measurement_that_does_not_hold_is_not_counted_and_the_plan_says_why():
    why = "tiny was measured on 2026-11-20 with different settings: arguments a, now b"
    stages = [tiny(each, "--max-num-seqs 8", port=8000 + each) for each in range(2)]
    pages = {("a", 8000 + each): finished(100, 103, 108) for each in range(2)}

    found = busy(pages, *stages, carries={"tiny-0": why, "tiny-1": why}, seconds=4.0)

    assert [each.share for each in found] == [pytest.approx(1 / 8)] * 2
    assert remarks(found) == (f"tiny-0, tiny-1: gpufleet does not use a measured rate: {why}",)


def test_a_measurement_makes_no_replica_emptier_than_its_slots():
    pages = {("a", 8000): finished(100, 101, 102, running=6)}

    (found,) = busy(pages, carries={"tiny-0": rate(100.0)}, seconds=4.0)

    assert found.share == pytest.approx(6 / 8)


@pytest.mark.parametrize("counts", [(100, 3), (100,)])
def test_requests_of_a_server_that_has_started_since_are_not_counted(counts):
    (found,) = busy({("a", 8000): finished(*counts)}, carries={"tiny-0": rate(5.0)}, seconds=4.0)

    assert found.finished_per_second is None
    assert found.share == pytest.approx(1 / 8)


def test_replicas_stay_that_slots_alone_would_let_go():
    pages = {("a", 8000 + each): finished(0, 8) for each in range(4)}
    stages = [tiny(each, "--max-num-seqs 8", port=8000 + each) for each in range(4)]

    before = busy(pages, *stages, seconds=4.0)
    after = busy(
        pages, *stages, carries={f"tiny-{each}": rate(3.0) for each in range(4)}, seconds=4.0
    )

    assert required_replicas(before, headroom=0.85)["tiny"].needed == 1
    need = required_replicas(after, headroom=0.85)["tiny"]
    assert need.needed == 4
    # The three or more alike are one measurement.
    assert need.measured == "on 2026-11-20 (8 days ago, fingerprint 0a1b2c3d)"
    assert required_replicas(before, headroom=0.85)["tiny"].measured == ""
