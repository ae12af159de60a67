"""A fleet of two engines: real vLLM and real SGLang on the same nodes, behind one gateway.

Tests run in the order in which they stand: each takes the fleet as the one before left it. Long.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlencode

import openai
import pytest

from gpufleet.engines import promql
from gpufleet.engines.engine import Measure
from lab import provisioning_sources
from tests.lab.gateway_pair import until
from tests.lab.upgrade_fleet import FLAGS, GATES, GATEWAY, UpgradeFleet, upgrade_fleet
from tests.lab.upgrade_load import Clients, clients, summary
from tests.lab.walk import UNI, UNI_FLAGS
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
# What of a model's settings is its engine's: FLAGS has vLLM's context.
OF_ENGINE: dict[str, dict[str, Any]] = {
    # An idle worker of its own process takes a third of a core.
    "vllm": {"flags": UNI_FLAGS, "environment": UNI},
    "sglang": {"context": 512, "flags": SGLANG_FLAGS},
}
RUNNING = {"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}
"""Each engine's own name of the requests that are under way."""
# What a server of either engine reaches with two others on two cores.
RATE = 2.5


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpgradeFleet]:
    with upgrade_fleet(LAB_ID, tmp_path_factory.mktemp("engines"), NODES, also=()) as found:
        found.declare_release(provisioning_sources.VLLM)
        found.declare(
            gpus={"reserved": []},
            sglang=provisioning_sources.sglang_settings(found.state, print),
            serving={
                "tiny": of_engine(found.wanted["serving"]["tiny"], "vllm"),
                "other": {**of_engine(found.wanted["serving"]["tiny"], "sglang"), "port": 8100},
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


def test_a_drained_node_finishes_its_requests_and_gets_no_others(
    fleet: UpgradeFleet, model: str
) -> None:
    """SGLang accepts requests while it drains: only the gateway keeps them away."""
    node = NODES[0]
    out = fleet.project / f"drained-{model}.jsonl"
    with clients(fleet.url, fleet.key_of_clients, out, together=4, model=model) as asking:
        until(lambda: running(fleet, node, model) > 0, "the node works", 120)
        run = fleet.gpufleet(
            "drain", fleet.inventory, node, "--why", "a fan", "--json", seconds=300
        )
        try:
            assert run.status == 0, run.output
            drained = time.time()
            assert running(fleet, node, model) == 0
            until(lambda: len(asking.requests(since=drained)) >= 8, "the other one answers", 300)
            assert running(fleet, node, model) == 0
        finally:
            back = fleet.gpufleet("undrain", fleet.inventory, node)
        assert back.status == 0, back.output
        until(lambda: running(fleet, node, model) > 0, "the node works again", 120)
        asking.stop()
        assert summary(asking.requests()).failures == {}


def test_a_model_moves_to_the_other_engine_and_back_and_no_request_is_lost(
    fleet: UpgradeFleet, model: str
) -> None:
    """In waves, with gates, while clients ask for both models; back without a network."""
    before = fleet.wanted["serving"]
    moved = of_engine(before[model], other_engine(model))
    # Engines differ in speed, and on two cores all latencies do.
    gates = {**GATES, "latency_ratio": 100.0}
    fleet.declare(upgrade={"canary": 1, "waves": [1], "gates": gates})
    with asking_for_both(fleet, f"{model}-moves") as asking:
        fleet.declare(serving={model: moved})
        done = fleet.upgrade()
        assert done.returncode == 0, done.stdout
        assert programs(fleet, model) == dict.fromkeys(NODES, moved["engine"])

        fleet.stop_mirror()
        try:
            back = fleet.begin("rollback")
            assert back.wait(timeout=1800) == 0, fleet.said()
        finally:
            fleet.start_mirror()
        assert programs(fleet, model) == dict.fromkeys(NODES, ENGINES[model])
    found = [summary(each.requests()) for each in asking]
    print(f"requests while {model} moved: {[each.requests for each in found]}")
    assert [each.failures for each in found] == [{}, {}]
    # What follows the settings, such as the watchdog's list of servers, goes back with them.
    served = fleet.pids()
    fleet.declare(serving=before)
    run = fleet.pyinfra("-y", seconds=900)
    assert run.status == 0, run.output
    assert fleet.pids() == served
    run = fleet.pyinfra("-y", "--json", seconds=900)
    assert run.status == 0, run.output
    assert run.changed == {}


def test_a_replica_spans_nodes_and_ends_and_serves_again_as_one(
    fleet: UpgradeFleet, model: str
) -> None:
    """Two ranks on two nodes; one of them is killed."""
    kept = fleet.wanted["serving"]
    wide = {**kept[model], "tensor_parallel": 2, "span_nodes": True, "replicas": 1}
    if ENGINES[model] == "vllm":
        wide |= {"flags": FLAGS, "environment": {}}
    # One GPU a node: a replica of two has to span both.
    fleet.declare(gpus={"reserved": [1]})
    fleet.wanted["serving"] = {model: wide}
    fleet.declare()
    run = fleet.pyinfra("-y", seconds=1800)
    assert run.status == 0, run.output
    assert completed(fleet, model)
    unit = f"vllm-{model}-0.service"
    for node in NODES:
        state = json.loads(fleet.ssh(node, f"cat /run/vllm/{model}-0/rank.json"))
        assert state["replica"] == f"{model}-0"

    fleet.ssh(NODES[1], f"kill -9 $(systemctl show -P MainPID {unit})")
    until(lambda: all(restarts(fleet, node, unit) for node in NODES), "both ranks end", 300)
    until(lambda: bool(completed(fleet, model)), "it answers again", 600)
    run = fleet.pyinfra("-y", "--json", seconds=900)
    assert run.status == 0, run.output
    assert run.changed == {}
    fleet.wanted["serving"] = kept
    fleet.declare(gpus={"reserved": []})


def restarts(fleet: UpgradeFleet, node: str, unit: str) -> int:
    return int(fleet.ssh(node, f"systemctl show -P NRestarts {unit}"))


def other_engine(model: str) -> str:
    """Return the engine that a model does not have."""
    return next(engine for engine in ENGINES.values() if engine != ENGINES[model])


def of_engine(declared: dict[str, Any], engine: str) -> dict[str, Any]:
    """Return a model's settings with an engine and what belongs to it."""
    of_engines = {key for values in OF_ENGINE.values() for key in values}
    kept = {key: value for key, value in declared.items() if key not in of_engines}
    return {**kept, "engine": engine, **OF_ENGINE[engine]}


@contextmanager
def asking_for_both(fleet: UpgradeFleet, name: str) -> Iterator[list[Clients]]:
    """Have clients ask for both models; once all are answered, do what follows; stop them."""
    with ExitStack() as stack:
        asking = []
        for model in ENGINES:
            out = fleet.project / f"{name}-{model}.jsonl"
            load = clients(fleet.url, fleet.key_of_clients, out, rate=RATE, model=model)
            asking.append(stack.enter_context(load))
        until(lambda: min(len(each.requests()) for each in asking) > 3 * RATE, "answers", 120)
        yield asking
        for each in asking:
            each.stop()


def running(fleet: UpgradeFleet, node: str, model: str) -> float:
    """Return the requests under way on a node, by its server's own metrics."""
    url = f"http://{fleet.address(node)}:{port(model)}/metrics"
    key = f"Authorization: Bearer {fleet.key}\n"
    said = fleet.ssh(GATEWAY, f"curl -sS --max-time 20 -H @- {url}", stdin=key)
    name = RUNNING[ENGINES[model]]
    found = [line.split()[-1] for line in said.splitlines() if line.startswith(f"{name}{{")]
    assert found, said[:2000]
    return sum(map(float, found))


def completed(fleet: UpgradeFleet, model: str) -> str:
    """Return an answer of a replica's server, without the gateway; "" if there is none."""
    url = f"http://{fleet.address(NODES[0])}:{port(model)}/v1"
    with openai.OpenAI(base_url=url, api_key=fleet.key, timeout=30, max_retries=0) as client:
        try:
            said = client.completions.create(model=model, prompt="Hello", max_tokens=8)
        except openai.OpenAIError:
            return ""
    return said.choices[0].text


def programs(fleet: UpgradeFleet, model: str) -> dict[str, str]:
    """Return the program that serves a model on each node."""
    found = {}
    for node in NODES:
        pid = f"$(systemctl show -P MainPID 'vllm-{model}-*')"
        words = fleet.ssh(node, f"tr '\\0' '\\n' < /proc/{pid}/cmdline").split("\n")
        found[node] = words[words.index("serve") - 1].rpartition("/")[2]
    return found
