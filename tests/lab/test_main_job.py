"""`pyinfra inventories/lab.py deploys/vllm.py`, walked whole, on real nodes with real vLLM.

Tests run in the order in which they stand: each takes the fleet as the one before left it, which
is converged.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import testinfra
from prometheus_client.parser import text_string_to_metric_families

from tests.lab.conftest import ROOT, Fleet
from tests.lab.faults import converged, declared, deploy_killed_after

PROMPT = "Hello"


def test_a_dry_run_of_bare_nodes_foretells_everything_and_touches_nothing(nodes: Fleet) -> None:
    run = nodes.pyinfra("--dry", "--json")
    assert run.status == 0, run.output
    both = ["gpu-01", "gpu-02"]
    foretold = {name: sorted(where) for name, where in run.changed.items()}
    # A release is built and a model downloaded by one of them, and copied to the other.
    once = {name for name in foretold if name.split(" | ")[-1].startswith(("build ", "stage "))}
    copies = {name for name in foretold if name.split(" | ")[-1].startswith("copy ")}
    assert {len(foretold[name]) for name in once | copies} == {1}
    assert len(once) == len(copies) == 2
    others = set(foretold) - once - copies
    assert [name for name in others if foretold[name] != both] == []
    for part in ("toolkit", "DCGM | packages", "build release", "stage lab/tiny", "stages"):
        assert any(part in name for name in foretold), foretold
    for node in both:
        untouched = "test ! -e /etc/vllm && test ! -e /opt/vllm && test ! -e /var/lib/gpufleet"
        nodes.ssh(node, f"{untouched} && ! dpkg -s cuda-keyring 2>/dev/null")


def test_a_repository_whose_key_is_another_is_refused(nodes: Fleet) -> None:
    """The keyring's hash is the trust anchor: with another one nothing is installed."""
    wrong = {
        "repository": {"url": f"{nodes.state.mirror_url}/vendor", "keyring_sha256": "0" * 64},
        "toolkit": "13-0",
        "version": "13.0.3-1",
    }
    run = nodes.pyinfra("-y", "--data", f"cuda={json.dumps(wrong)}")
    assert run.status != 0
    assert "cuda.repository.keyring_sha256" in run.output
    assert "Traceback" not in run.output
    nodes.ssh("gpu-01", "! dpkg -s cuda-keyring 2>/dev/null; ! apt-cache policy | grep NVIDIA")


def test_what_does_not_fit_is_refused_before_anything_changes(nodes: Fleet) -> None:
    nodes.set({"tiny": {"replicas": 50}})
    try:
        run = nodes.pyinfra("-y")
    finally:
        nodes.reset()
    assert run.status != 0
    assert "replicas" in run.output
    assert "Starting operation" not in run.output
    assert "Traceback" not in run.output


@pytest.fixture(params=["gpu-01", "gpu-02"])
def client(deployed: Fleet, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    url = f"http://{deployed.address(request.param)}:8000/v1"
    with openai.OpenAI(base_url=url, api_key=deployed.key, timeout=60, max_retries=0) as made:
        yield made


def test_a_client_that_is_not_ours_gets_completions(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.usage
    assert answer.usage.completion_tokens == 8


def test_a_client_that_is_not_ours_gets_a_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content


def test_streams_say_what_whole_answers_say(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text
    parts = [part.choices[0].text for part in client.completions.create(**ask, stream=True)]
    assert len(parts) > 1
    assert "".join(parts) == whole
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=8,
        temperature=0,
        stream=True,
    )
    assert "".join(part.choices[0].delta.content or "" for part in chat)


@pytest.mark.parametrize("node", ["gpu-01", "gpu-02"])
def test_without_the_key_nothing_is_answered(deployed: Fleet, node: str) -> None:
    url = f"http://{deployed.address(node)}:8000/v1"
    for key in ("", "wrong"):
        with (
            openai.OpenAI(base_url=url, api_key=key or "none", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()


def test_the_second_run_changes_nothing_and_restarts_nothing(deployed: Fleet) -> None:
    before = deployed.pids()
    assert len(before) == 2
    run = deployed.pyinfra("-y", "--json")
    assert run.status == 0, run.output
    assert run.changed == {}
    assert deployed.pids() == before


def test_a_dry_run_of_a_converged_fleet_foretells_nothing(deployed: Fleet) -> None:
    run = deployed.pyinfra("--dry", "--json")
    assert run.status == 0, run.output
    assert run.changed == {}


def test_systemctl_cat_shows_every_flag_one_a_line(deployed: Fleet) -> None:
    text = deployed.ssh("gpu-01", "systemctl cat vllm-tiny-0.service")
    lines = [line.strip().removesuffix("\\").strip() for line in text.splitlines()]
    for flag in (
        "--tensor-parallel-size 2",
        "--port 8000",
        "--served-model-name tiny",
        "--max-model-len 512",
        "--enforce-eager",
        "--kv-cache-memory-bytes 64M",
    ):
        assert flag in lines, text
    argv = deployed.ssh(
        "gpu-01", "tr '\\0' '\\n' </proc/$(systemctl show -P MainPID vllm-tiny-0.service)/cmdline"
    ).split("\n")
    assert argv[argv.index("--max-model-len") + 1] == "512"
    assert argv[argv.index("--tensor-parallel-size") + 1] == "2"


def test_a_tensor_parallel_replica_really_runs_its_ranks(deployed: Fleet) -> None:
    """Two worker processes in the unit's own cgroup, on each node."""
    for name in deployed.pids():
        node, unit = name.split()
        titles = deployed.ssh(
            node,
            f"for p in $(cat /sys/fs/cgroup/system.slice/{unit}/cgroup.procs); do "
            "cat /proc/$p/comm /proc/$p/cmdline | tr '\\0' ' '; echo; done",
        )
        assert "VLLM::Worker_TP0" in titles, titles
        assert "VLLM::Worker_TP1" in titles, titles


def host(fleet: Fleet, node: str) -> testinfra.host.Host:
    return testinfra.get_host(
        f"ssh://{node}",
        ssh_config=str(fleet.state.ssh_config),
        ssh_extra_args="-o ControlMaster=auto -o ControlPersist=30 "
        f"-o ControlPath={fleet.state.dir}/control-%h",
    )


@pytest.mark.parametrize("node", ["gpu-01", "gpu-02"])
def test_a_node_is_what_the_roles_say(deployed: Fleet, node: str) -> None:
    there = host(deployed, node)
    for name, version in (
        ("cuda-toolkit-13-0", "13.0.3-1"),
        ("datacenter-gpu-manager-4-core", "1:4.6.0-1"),
        ("datacenter-gpu-manager-4-cuda13", "1:4.6.0-1"),
        ("datacenter-gpu-manager-exporter", "4.8.2-1"),
    ):
        assert there.package(name).version == version
    held = there.check_output("apt-mark showhold").split()
    assert "cuda-toolkit-13-0" in held
    assert "datacenter-gpu-manager-4-core" in held
    assert "13.0.3-1" in there.check_output("apt-cache policy cuda-toolkit-13-0 | grep Candidate")
    # Whatever becomes of the vendor's repository, the node's own apt goes on without.
    assert f"{deployed.state.mirror_url}/vendor" not in there.check_output("apt-cache policy")
    assert "release 13.0" in there.check_output("/usr/local/cuda/bin/nvcc --version")
    for unit in (
        "vllm-tiny-0.service" if node == "gpu-01" else "vllm-tiny-1.service",
        "prometheus-node-exporter.service",
        "nvidia-dcgm.service",
        "nvidia-dcgm-exporter.service",
    ):
        assert there.service(unit).is_running
        assert there.service(unit).is_enabled
    credentials = there.file("/etc/vllm/credentials")
    assert (credentials.user, credentials.mode) == ("root", 0o700)
    assert there.file("/etc/vllm/credentials/api-key").mode == 0o600
    assert there.check_output("systemctl is-system-running || true") == "running"


@pytest.mark.parametrize(("node", "gpus"), [("gpu-01", 8), ("gpu-02", 4)])
def test_dcgm_counts_every_gpu(deployed: Fleet, node: str, gpus: int) -> None:
    text = deployed.ssh(node, "curl -fsS http://127.0.0.1:9400/metrics")
    series = [line for line in text.splitlines() if line.startswith("DCGM_FI_DEV_GPU_TEMP{")]
    assert len(series) == gpus


@pytest.mark.parametrize(("node", "gpus"), [("gpu-01", 8), ("gpu-02", 4)])
def test_a_nodes_own_facts_are_served(deployed: Fleet, node: str, gpus: int) -> None:
    """By the node exporter: what the node's timer reads, and what the deploy found at its end."""
    deployed.ssh(node, "systemctl start gpufleet-facts.service")  # the timer's next run, now
    text = deployed.ssh(node, "curl -fsS http://127.0.0.1:9100/metrics")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("gpufleet_")
    }
    assert [key for key, value in found.items() if "gpufleet_facts_failed" in key and value] == []
    assert {found["gpufleet_gpus", state] for state in ("expected", "present")} == {gpus}
    stage = "tiny-0" if node == "gpu-01" else "tiny-1"
    assert found["gpufleet_stage_active", stage] == 1
    assert found["gpufleet_check_findings", "block"] == 0
    now = float(deployed.ssh(node, "date +%s"))
    assert found["gpufleet_deploy_timestamp_seconds", "vllm"] > now - 3600
    assert found["gpufleet_facts_timestamp_seconds",] > now - 150


@pytest.mark.parametrize("node", ["gpu-01", "gpu-02"])
def test_exporters_have_no_rights_and_one_host_engine(deployed: Fleet, node: str) -> None:
    """One engine, on loopback; asked by an exporter that is nobody, as the other one is."""
    listed = deployed.ssh(node, "ps -eo user:20,args; ss -Hltn sport = :5555").splitlines()
    running = [[*line.split(None, 1), ""][:2] for line in listed]
    assert len([words for _, words in running if "nv-hostengine" in words]) == 1
    users = [user for user, words in running if "dcgm-exporter" in words or "node-exp" in words]
    assert len(users) == 2
    assert "root" not in users
    assert [line.split()[3] for line in listed if line.startswith("LISTEN")] == ["127.0.0.1:5555"]


def test_verify_changes_nothing_and_passes(deployed: Fleet) -> None:
    run = deployed.pyinfra("-y", "--json", deploy="deploys/verify.py")
    assert run.status == 0, run.output
    assert run.changed == {}


def test_verify_finds_a_dead_exporter_and_the_deploy_brings_it_back(fleet: Fleet) -> None:
    fleet.ssh("gpu-02", "systemctl stop prometheus-node-exporter.service")
    run = fleet.pyinfra("-y", deploy="deploys/verify.py")
    assert run.status != 0
    assert "prometheus-node-exporter.service" in run.output
    before = fleet.pids()
    assert fleet.pyinfra("-y").status == 0
    assert fleet.pyinfra("-y", deploy="deploys/verify.py").status == 0
    assert fleet.pids() == before


@pytest.mark.long
def test_verify_finds_a_frozen_engine_that_looks_healthy(fleet: Fleet) -> None:
    """/health stays 200 while the engine is stopped: only a completion tells."""
    engine = fleet.ssh(
        "gpu-01",
        "grep -l EngineCor $(sed 's,.*,/proc/&/comm,' "
        "/sys/fs/cgroup/system.slice/vllm-tiny-0.service/cgroup.procs)",
    ).split("/")[2]
    fleet.ssh("gpu-01", f"kill -STOP {engine}")
    try:
        health = fleet.ssh(
            "gpu-01", "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8000/health"
        )
        run = fleet.pyinfra("-y", "--limit", "gpu-01", deploy="deploys/verify.py")
    finally:
        fleet.ssh("gpu-01", f"kill -CONT {engine}")
    assert health == "200"
    assert run.status != 0
    assert "its engine is frozen" in run.output


@pytest.mark.long
def test_one_changed_value_restarts_exactly_what_it_touches_and_the_dry_run_says_so(
    fleet: Fleet,
) -> None:
    """A second model changes: the first keeps its processes."""
    tiny = declared("tiny")
    fleet.set({"extra": {**tiny, "tensor_parallel": 1, "replicas": 1, "port": 8100}})
    assert fleet.pyinfra("-y", seconds=1200).status == 0
    before = fleet.pids()
    assert len(before) == 3

    fleet.set({"extra": {"flags": {**tiny["flags"], "max-num-seqs": 4}}})
    dry = fleet.pyinfra("--dry", "--json")
    assert dry.status == 0, dry.output
    foretold = dry.changed
    touched = next(name.split()[0] for name in before if "extra" in name)
    assert {node for nodes in foretold.values() for node in nodes} == {touched}
    assert any("stages" in name for name in foretold)
    assert "restart vllm-extra-0.service" in fleet.pyinfra("--dry").output
    assert fleet.pids() == before

    assert fleet.pyinfra("-y", seconds=1200).status == 0
    after = fleet.pids()
    assert {name for name in before if before[name] != after.get(name)} == {
        name for name in before if "extra" in name
    }

    fleet.set({"extra": None})
    assert fleet.pyinfra("-y").status == 0
    gone = fleet.pids()
    assert gone == {name: pid for name, pid in after.items() if "extra" not in name}
    assert "vllm-extra" not in fleet.ssh(touched, "ls /etc/systemd/system")


def test_a_flag_that_vllm_does_not_know_is_refused_before_anything_changes(fleet: Fleet) -> None:
    """It would kill the service at its start: the operator reads which line to change instead."""
    before = fleet.pids()
    tiny = declared("tiny")
    wrong = {**tiny["flags"], "no-such-flag": 3}
    fleet.set(
        {"wrong": {**tiny, "tensor_parallel": 1, "replicas": 1, "port": 8200, "flags": wrong}}
    )
    run = fleet.pyinfra("-y")
    assert run.status == 1
    assert "serving.wrong.flags.no-such-flag" in run.output
    assert "Traceback" not in run.output
    assert fleet.pids() == before


def test_no_secret_is_on_a_command_line_in_the_journal_or_in_a_readable_file(
    fleet: Fleet,
) -> None:
    """The key and the token, looked for by grep on the nodes, during and after a deploy."""
    noisy = [fleet.pyinfra("-y", "--debug", "-vvv", "--diff"), fleet.pyinfra("--dry", "-vvv")]
    secrets = {"api key": fleet.key, "hf token": fleet.hf_token}
    for name, secret in secrets.items():
        assert len(secret) >= 16
        for run in noisy:
            assert run.status == 0, run.output[-3000:]
            assert secret not in run.output, f"the {name} is in pyinfra's output"
        for node in fleet.state.nodes:
            # The secret comes over stdin and lies in a file that the search passes over, so that
            # the search itself does not hold it in an argument.
            found = fleet.ssh(
                node.name,
                "umask 077; cat > /run/wanted; "
                "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f 2>/dev/null; echo; done "
                "| grep -F -f /run/wanted; "
                "journalctl --no-pager | grep -c -F -f /run/wanted; "
                "find / -xdev -type f -perm /o=r -size -2000k -newer /etc/hostname "
                "-not -path '/proc/*' -not -path '/sys/*' 2>/dev/null "
                '| xargs -d "\\n" grep -l -F -f /run/wanted 2>/dev/null; rm /run/wanted',
                seconds=300,
                stdin=secret + "\n",
            )
            assert found.split() == ["0"], f"{node.name}: the {name} is readable: {found}"


# These two leave their value in place, converged: the next test's fixture puts it back.
@pytest.mark.long
def test_a_deploy_killed_in_the_middle_is_finished_by_the_next(deployed: Fleet) -> None:
    """The restart that was due is not lost, though the next run finds every file in place."""
    deploy_killed_after(deployed, seconds=6.0, seqs=5)
    converged(deployed, seqs=5)


@pytest.mark.long
def test_a_node_without_power_stops_a_run_and_serves_again_by_itself(fleet: Fleet) -> None:
    """While it is down nothing is changed anywhere; when it is up there is nothing to change."""
    before = fleet.pids()
    settings = fleet.project / "group_vars/lab.yml"
    runs = settings.read_text()  # what runs: the test before has changed a value
    fleet.lab.power("gpu-02", "off")
    try:
        fleet.set({"tiny": {"drain_seconds": 21}})
        run = fleet.pyinfra("-y")
        assert run.status != 0
        assert "gpu-02" in run.output
        assert (
            fleet.ssh("gpu-01", "systemctl show -P MainPID vllm-tiny-0.service").strip()
            == (before["gpu-01 vllm-tiny-0.service"])
        )
    finally:
        fleet.lab.power("gpu-02", "on")
    settings.write_text(runs)
    run = fleet.pyinfra("-y", "--json", seconds=900)
    assert run.status == 0, run.output
    changed = set(run.changed)
    assert all("answers" in name for name in changed), changed
    assert fleet.pids().keys() == before.keys()
    again = fleet.pyinfra("-y", "--json")
    assert again.changed == {}


def test_signals_end_a_deploy_like_any_command(deployed: Fleet) -> None:
    """Ctrl-C ends it soon, and leaves nothing running on the controller."""
    run = deployed.popen()
    deadline = time.monotonic() + 30
    while "Connecting" not in deployed.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=60) != 0


def test_what_the_plan_says_is_what_runs(deployed: Fleet) -> None:
    """`gpufleet plan --json` and the nodes' units agree."""
    done = subprocess.run(
        [Path(sys.executable).with_name("gpufleet"), "plan", deployed.inventory, "--json"],
        cwd=ROOT,
        env=deployed.env(),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    planned = {
        f"{stage['node']} vllm-{stage['model']}-{stage['replica']}.service"
        for stage in json.loads(done.stdout)["stages"]
    }
    assert planned == set(deployed.pids())
