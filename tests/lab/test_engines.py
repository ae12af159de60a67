"""A fleet of two engines: real vLLM and real SGLang on the same nodes, behind one gateway.

Tests run in the order in which they stand: each takes the fleet as the one before left it. Long.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from urllib.parse import urlencode

import openai
import pytest

from gpufleet.engines import promql
from gpufleet.engines.engine import Measure
from lab import provisioning_sources
from tests.lab.upgrade_fleet import GATEWAY, UpgradeFleet, upgrade_fleet
from tests.lab.upgrade_load import clients, summary
from tests.support.checkout import own_lab

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

LAB_ID = own_lab("gfen")
NODES = ("gpu-01", "gpu-02")
ENGINES = {"tiny": "vllm", "other": "sglang"}
"""The engine of each model."""
# Of SGLang on CPUs: docs/develop/sglang.md.
SGLANG_FLAGS = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-overlap-schedule": True,
    "mem-fraction-static": 0.05,
    "max-total-tokens": 4096,
    "max-running-requests": 8,
    # Otherwise an idle scheduler takes a core.
    "sleep-on-idle": True,
}
# What a server of either engine reaches with two others on two cores.
RATE = 2.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpgradeFleet]:
    with upgrade_fleet(LAB_ID, tmp_path_factory.mktemp("engines"), NODES, also=()) as found:
        found.declare_release(provisioning_sources.VLLM)
        found.declare(
            gpus={"reserved": []},
            sglang=provisioning_sources.sglang_settings(found.state, print),
            serving={
                **found.wanted["serving"],
                "other": {
                    **found.wanted["serving"]["tiny"],
                    "engine": "sglang",
                    "port": 8100,
                    "context": 512,
                    "flags": SGLANG_FLAGS,
                },
            },
        )
        found.deploy()
        yield found


def port(model: str) -> int:
    return 8000 if model == "tiny" else 8100


@pytest.fixture(params=ENGINES)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_gateway_has_answers_of_both_engines(fleet: UpgradeFleet, model: str) -> None:
    with openai.OpenAI(
        base_url=fleet.url, api_key=fleet.key_of_clients, timeout=60, max_retries=0
    ) as client:
        assert model in {each.id for each in client.models.list()}
        ask = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(**ask)  # type: ignore[call-overload]
        assert whole.usage.completion_tokens == 8
        parts = [part.choices[0].text for part in client.completions.create(**ask, stream=True)]  # type: ignore[call-overload]
        assert "".join(parts) == whole.choices[0].text


def test_each_server_runs_from_its_engines_release(fleet: UpgradeFleet, model: str) -> None:
    for node in NODES:
        pid = f"$(systemctl show -P MainPID 'vllm-{model}-*')"
        said = fleet.ssh(node, f"tr '\\0' '\\n' < /proc/{pid}/cmdline")
        assert f"bin/{ENGINES[model]}\nserve" in said


@pytest.mark.parametrize("path", ["v1/models", "v1/completions", "server_info", "flush_cache"])
def test_a_server_answers_nobody_without_the_key(
    fleet: UpgradeFleet, model: str, path: str
) -> None:
    for node in NODES:
        url = f"http://{fleet.address(node)}:{port(model)}/{path}"
        said = fleet.ssh(GATEWAY, f"curl -s -o /dev/null -w '%{{http_code}}' -X POST {url}")
        assert said.strip() in {"401", "404", "405"}, (node, path)
        got = fleet.ssh(GATEWAY, f"curl -s -o /dev/null -w '%{{http_code}}' {url}")
        assert got.strip() in {"401", "404", "405"}, (node, path)


def test_the_key_is_in_no_journal_and_on_no_command_line(fleet: UpgradeFleet) -> None:
    key = fleet.key
    for node in NODES:
        journal = fleet.ssh(node, "journalctl --no-pager -o cat -u 'vllm-*'")
        assert "server_args=" in journal
        assert key not in journal
        lines = fleet.ssh(node, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
        assert "sglang serve" in lines
        assert key not in lines


def test_clients_with_the_key_do_not_administrate_a_server(fleet: UpgradeFleet) -> None:
    url = f"http://{fleet.address(NODES[0])}:{port('other')}/flush_cache"
    command = f"curl -s -o /dev/null -w '%{{http_code}}' -X POST -H @- {shlex.quote(url)}"
    said = fleet.ssh(GATEWAY, command, stdin=f"Authorization: Bearer {fleet.key}\n")
    assert said.strip() == "401"


@pytest.mark.parametrize("measure", [Measure.RUNNING, Measure.GENERATED, Measure.E2E])
def test_prometheus_has_what_alerts_read_of_both_engines(
    fleet: UpgradeFleet, measure: Measure
) -> None:
    deadline = time.monotonic() + 120
    query = f"count by (model) ({promql.metric(measure)})"
    url = f"http://127.0.0.1:9090/api/v1/query?{urlencode({'query': query})}"
    while True:
        found = json.loads(fleet.ssh(GATEWAY, f"curl -sS --max-time 20 {shlex.quote(url)}"))
        if {each["metric"].get("model") for each in found["data"]["result"]} == {*ENGINES}:
            return
        assert time.monotonic() < deadline, found
        time.sleep(2)


def test_a_second_run_changes_nothing(fleet: UpgradeFleet) -> None:
    run = fleet.pyinfra("-y", "--json", seconds=900)
    assert run.status == 0, run.output
    assert run.changed == {}


def test_what_is_deployed_is_verified(fleet: UpgradeFleet) -> None:
    run = fleet.pyinfra("-y", deploy="deploys/verify.py", seconds=600)
    assert run.status == 0, run.output


def test_a_killed_server_comes_back(fleet: UpgradeFleet, model: str) -> None:
    node = NODES[0]
    unit = f"'vllm-{model}-*'"
    before = fleet.ssh(node, f"systemctl show -P MainPID {unit}").strip()
    fleet.ssh(node, f"kill -9 {before}")
    run = fleet.pyinfra("-y", seconds=900)
    assert run.status == 0, run.output
    assert fleet.ssh(node, f"systemctl show -P MainPID {unit}").strip() not in {before, "0"}


def test_a_flag_that_a_release_refuses_stops_a_deploy_before_its_first_operation(
    fleet: UpgradeFleet,
) -> None:
    kept = fleet.wanted["serving"]["other"]
    wrong = {**kept, "flags": {**SGLANG_FLAGS, "max-model-len": 512}}
    fleet.declare(serving={**fleet.wanted["serving"], "other": wrong})
    try:
        run = fleet.pyinfra("-y")
    finally:
        fleet.declare(serving={**fleet.wanted["serving"], "other": kept})
    assert run.status != 0
    assert "serving.other.flags.max-model-len" in run.output
    assert "SGLang 0.5.23" in run.output
    assert "Starting operation" not in run.output


def test_a_model_moves_to_the_other_engine_and_back_and_no_request_is_lost(
    fleet: UpgradeFleet,
) -> None:
    """In waves, with gates, while clients ask for both models; back without a network."""
    before = fleet.wanted["serving"]["tiny"]
    fleet.declare(upgrade={"canary": 1, "waves": [1]})
    out = fleet.project / "other.jsonl"
    with (
        fleet.load("moved", RATE) as tiny,
        clients(fleet.url, fleet.key_of_clients, out, rate=RATE, model="other") as other,
    ):
        while min(len(tiny.requests()), len(other.requests())) < 3 * RATE:
            time.sleep(0.5)
        fleet.declare_model(engine="sglang", context=512, flags=SGLANG_FLAGS)
        done = fleet.upgrade()
        assert done.returncode == 0, done.stdout
        assert program_of(fleet) == dict.fromkeys(NODES, "sglang")

        fleet.stop_mirror()
        try:
            back = fleet.begin("rollback")
            assert back.wait(timeout=1800) == 0, fleet.said()
        finally:
            fleet.start_mirror()
        assert program_of(fleet) == dict.fromkeys(NODES, "vllm")
        tiny.stop()
        other.stop()
        for seen in (summary(tiny.requests()), summary(other.requests())):
            assert seen.failed == 0, seen.failures
    fleet.declare(serving={**fleet.wanted["serving"], "tiny": before})
    fleet.changes_nothing()


def test_a_replica_of_sglang_spans_nodes_and_ends_and_serves_again_as_one(
    fleet: UpgradeFleet,
) -> None:
    """Two ranks on two nodes; one of them is killed while the other works."""
    wide = {
        **fleet.wanted["serving"]["other"],
        "tensor_parallel": 2,
        "span_nodes": True,
        "replicas": 1,
    }
    kept = fleet.wanted["serving"]
    # One GPU a node: a replica of two has to span both.
    fleet.declare(gpus={"reserved": [1]}, serving={"other": wide})
    fleet.wanted["serving"] = {"other": wide}
    fleet.declare()
    run = fleet.pyinfra("-y", seconds=1800)
    assert run.status == 0, run.output
    assert completed(fleet)
    for node in NODES:
        state = fleet.ssh(node, "cat /run/vllm/other-0/rank.json")
        assert json.loads(state)["replica"] == "other-0"

    fleet.ssh(NODES[1], "kill -9 $(systemctl show -P MainPID vllm-other-0.service)")
    deadline = time.monotonic() + 600
    while not (again := completed(fleet)):
        assert time.monotonic() < deadline, again
        time.sleep(2)
    for node in NODES:
        restarts = fleet.ssh(node, "systemctl show -P NRestarts vllm-other-0.service")
        assert int(restarts) >= 1
    run = fleet.pyinfra("-y", "--json", seconds=900)
    assert run.status == 0, run.output
    assert run.changed == {}
    fleet.declare(gpus={"reserved": []}, serving=kept)


def completed(fleet: UpgradeFleet) -> str:
    """Return an answer of the model `other`, without the gateway; "" if there is none."""
    url = f"http://{fleet.address(NODES[0])}:{port('other')}/v1"
    with openai.OpenAI(base_url=url, api_key=fleet.key, timeout=30, max_retries=0) as client:
        try:
            said = client.completions.create(model="other", prompt="Hello", max_tokens=8)
        except openai.OpenAIError:
            return ""
    return said.choices[0].text


def program_of(fleet: UpgradeFleet) -> dict[str, str]:
    """Return the program that serves `tiny` on each node."""
    found = {}
    for node in NODES:
        pid = "$(systemctl show -P MainPID 'vllm-tiny-*')"
        words = fleet.ssh(node, f"tr '\\0' '\\n' < /proc/{pid}/cmdline").split("\n")
        found[node] = words[words.index("serve") - 1].rpartition("/")[2]
    return found
