"""Which replicas serve, and why others do not: from a node's own answers to a line a rank."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from rich.console import Console

from gpufleet.cli.status_command import status_table
from gpufleet.on_node.change import wait
from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.serving.status import engines, main, read_event
from gpufleet.planning.stage import Stage
from gpufleet.serving.rank_status import Health
from gpufleet.serving.status import fleet_status
from gpufleet.serving.unit import render_unit
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served, Vllm
from tests.support import warm_command
from tests.support.rows import each_row

KEY = "f3a9c1d2e4b5a697"
UNIT = "vllm-llama-0.service"
BOOT, EARLIER_BOOT = "b" * 32, "a" * 32
NOW, BEFORE = "1" * 32, "0" * 32  # invocations
CLOCK = 1_795_290_000.0
MARK = {"by": "ann@desk", "why": "new fans", "since": CLOCK - 7200, "upgrade": None}
LOCK = {
    "id": "20261121T180000Z-0a1b",
    "owner": "ann@desk",
    "from": "desk:/srv/fleet",
    "since": CLOCK - 300,
    "what": "vLLM 0.32.0",
}

# -- on the node -----------------------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM does."""

    health = 200
    guarded = True

    def do_GET(self):
        keyed = self.headers["Authorization"] == f"Bearer {KEY}"
        keyed |= self.path == "/invocations" and not self.guarded
        status = self.health if self.path == "/health" else 200 if keyed else 401
        said = {"data": [{"id": "llama"}], "choices": [{"text": "9"}]}
        body = json.dumps(said).encode() if status == 200 else b"{}"
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def port(monkeypatch):
    """Of a server that answers as vLLM does, on this machine."""
    monkeypatch.setattr(Server, "health", 200)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def node(tmp_path, monkeypatch, capfd, port):
    """
    A node with the unit of `llama-0`; `node.look()` returns what the program prints.

    `node.program(name, script)` gives it a program; systemctl and journalctl say what is usual.
    """
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    for folder in (
        "etc/systemd/system",
        "etc/vllm/credentials",
        "usr/bin",
        "run/vllm/llama-0",
        "proc/sys/kernel/random",
    ):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path}/usr/bin", prepend=":")
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("b" * 32)
    (tmp_path / "etc/vllm/credentials/api-key").write_text(KEY + "\n")

    def program(name, script):
        path = tmp_path / "usr/bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    vllm = Vllm(version="0.32.0", lock="x", listen="0.0.0.0", api_key_file="key")
    stage = Stage("llama", 0, "gpu-01", (1, 0), ("GPU-b", "GPU-a"), port, 2)
    served = Served(model="/srv/llama", flags={"chat-template": 'a "%$ --headless \n'})
    unit = render_unit(
        stage, served, vllm, release="0.32.0-1a2b", credentials={"api-key": "0" * 64}
    )
    (tmp_path / "etc/systemd/system" / UNIT).write_text(unit.content)
    monkeypatch.setattr(
        "gpufleet.on_node.serving.endpoints.started_with", lambda _: unit.fingerprint
    )
    at = int((time.clock_gettime(time.CLOCK_MONOTONIC) - 60) * 1e6)
    program(
        "systemctl",
        f"echo Id={UNIT}; echo ActiveState=active; echo SubState=running; echo NRestarts=1\n"
        f"echo InvocationID={NOW}; echo ActiveEnterTimestampMonotonic={at}",
    )
    program("journalctl", "true")
    program("nvidia-smi", "echo 'GPU-a, 0'; echo 'GPU-b, 1'")

    def look(**parameters):
        monkeypatch.setattr("gpufleet.on_node.serving.status.PARAMETERS", parameters)
        main()
        return json.loads(capfd.readouterr().out)

    return SimpleNamespace(look=look, program=program, path=tmp_path)


def test_a_stage_that_answers_serves_and_no_key_is_printed(node):
    before = time.time()
    found = node.look()
    fleet = fleet_status({"gpu-01": found}, {}, whole=False)

    assert KEY not in json.dumps(found)
    (replica,) = fleet.replicas
    (rank,) = replica.ranks
    assert (replica.id, replica.health, rank.health, rank.why) == (
        "llama-0",
        Health.SERVES,
        Health.SERVES,
        "",
    )
    assert (rank.indices, rank.release, rank.restarts) == ((1, 0), "0.32.0-1a2b", 1)
    assert before - 60 - 60 < rank.since < time.time() - 60 + 1
    assert fleet.serves


def test_health_alone_is_not_enough(node, monkeypatch):
    monkeypatch.setattr(Server, "health", 503)
    (replica,) = fleet_status({"gpu-01": node.look()}, {}, whole=False).replicas

    assert replica.health is Health.STARTS
    assert "/health: HTTP 503" in replica.why[0]


def test_systemd_writes_signals_as_numbers():
    killed = {"MESSAGE_ID": "98e322203f7a4ed290d09fe03c09fe15", "EXIT_CODE": "killed"}

    assert read_event({**killed, "EXIT_STATUS": "9"})["signal"] == "KILL"
    assert read_event({**killed, "EXIT_STATUS": "50"})["signal"] == "50"
    assert "signal" not in read_event({**killed, "EXIT_CODE": "exited"})


def test_a_unit_that_hangs_its_systemctl_costs_only_itself(node, monkeypatch):
    (node.path / "etc/systemd/system/vllm-other-0.service").write_text("[Service]\n")
    node.program("systemctl", "exec sleep 60")
    monkeypatch.setattr("gpufleet.on_node.serving.status.STAGE_SECONDS", 1)
    found = node.look()

    assert found["stages"] == [
        {"unit": UNIT, "missing": "timeout", "seconds": 1},
        {"unit": "vllm-other-0.service", "foreign": True},
    ]
    fleet = fleet_status({"gpu-01": found}, {}, whole=False)
    assert "could not be read: timeout after 1 s" in fleet.silent["gpu-01"]
    assert not fleet.serves


def test_what_was_said_before_the_last_restart_comes_without_secrets(node):
    events = [
        {"MESSAGE_ID": message, "INVOCATION_ID": BEFORE, "_BOOT_ID": BOOT, **more}
        for message, more in (
            ("98e322203f7a4ed290d09fe03c09fe15", {"EXIT_CODE": "exited", "EXIT_STATUS": "1"}),
            ("5eb03494b6584870a536b337290809b3", {}),
        )
    ]
    (node.path / "events").write_text("".join(json.dumps(each) + "\n" for each in events))
    node.program(
        "journalctl",
        f'case "$*" in *UNIT=*) cat {node.path}/events;; *{BEFORE}*) '
        f"echo 'key {KEY}'; echo 'torch.OutOfMemoryError: CUDA out of memory';; esac",
    )
    found = node.look()

    assert KEY not in json.dumps(found)
    (rank,) = fleet_status({"gpu-01": found}, {}, whole=False).replicas[0].ranks
    assert rank.last_restart.cause.startswith("exit status 1: GPU memory is full")


def test_a_node_without_nvidia_smi_has_no_indices_and_serves(node):
    (node.path / "usr/bin/nvidia-smi").unlink()
    (replica,) = fleet_status({"gpu-01": node.look()}, {}, whole=False).replicas

    assert replica.health is Health.SERVES
    assert replica.ranks[0].indices == ()


def test_a_server_whose_guard_is_missing_is_wrong_and_no_change_takes_it_for_ready(
    node, monkeypatch
):
    server = wait.Server(UNIT)
    assert wait.is_ready(server, wait.look(server))

    monkeypatch.setattr(Server, "guarded", False)

    (rank,) = fleet_status({"gpu-01": node.look()}, {}, whole=False).replicas[0].ranks
    assert rank.health is Health.WRONG
    assert "answers POST /invocations without the API key with 200" in rank.why
    assert not wait.is_ready(server, wait.look(server))


def test_a_unit_that_an_older_gpufleet_wrote_is_judged_by_what_that_asked(node, monkeypatch):
    """So a fleet can be changed in waves, and rolled back."""
    path = node.path / "etc/systemd/system" / UNIT
    path.write_text(path.read_text().replace("--middleware gpufleet_guard.Guard", "--seed 1"))
    monkeypatch.setattr(Server, "guarded", False)

    assert (
        fleet_status({"gpu-01": node.look()}, {}, whole=False).replicas[0].health is Health.SERVES
    )
    server = wait.Server(UNIT)
    assert wait.is_ready(server, wait.look(server))


RANK = """\
[Service]
ExecStart=/usr/local/libexec/gpufleet/vllm-rank \\
    --replica llama-0 --rank {rank} --port 29500 \\
    --node gpu-01=10.1.0.1 --node gpu-02=10.1.0.2 \\
    -- /opt/vllm/releases/0.33.0-1f2e/bin/vllm serve \\
    /srv/llama \\
    --served-model-name "the \\"best\\" llama\\u00e9 100%%" \\
    --host {host} --port 8001 --nnodes 2 {headless}

[X-Gpufleet]
Model=llama
Replica=0
Rank={rank}
Port=8001
Gpus=GPU-a
"""


@pytest.mark.parametrize(
    ("rank", "host", "headless", "url"),
    [
        (0, "::", "", "http://127.0.0.1:8001"),
        (0, "::1", "", "http://[::1]:8001"),
        (1, "10.1.0.2", "--headless", None),
    ],
)
def test_a_rank_of_several_says_its_peers_and_where_it_answers(node, rank, host, headless, url):
    unit = node.path / "etc/systemd/system" / UNIT
    unit.write_text(RANK.format(rank=rank, host=host, headless=headless))
    (node.path / "run/vllm/llama-0/rank.json").write_text('{"schema": 1, "phase": "running"}')
    (stage,) = node.look()["stages"]

    assert stage["nodes"] == ["gpu-01", "gpu-02"]
    assert stage["served_name"] == 'the "best" llama\u00e9 100%'
    assert (stage["url"], stage["release"]) == (url, "0.33.0-1f2e")
    assert stage["state"]["phase"] == "running"


def test_marks_are_read_from_the_node_and_a_node_without_any_is_not_cordoned(node):
    assert node.look()["change"] == {"lock": None, "cordon": None, "drained": {}}

    folder = node.path / "var/lib/gpufleet/change"
    (folder / "drained").mkdir(parents=True)
    (folder / "cordon.json").write_text(json.dumps(MARK))
    (folder / "drained/llama-0.json").write_text(json.dumps(MARK))
    (folder / "lock.json").write_text(json.dumps(LOCK))

    assert node.look()["change"] == {"lock": LOCK, "cordon": MARK, "drained": {"llama-0": MARK}}


def test_a_mark_that_cannot_be_read_is_unknown_and_not_absent(node):
    folder = node.path / "var/lib/gpufleet/change"
    folder.mkdir(parents=True)
    (folder / "cordon.json").write_text("gpu-01 is ill")
    fleet = fleet_status({"gpu-01": node.look()}, {}, whole=False)

    assert fleet.out.cordoned == ()
    assert any("cordon" in each and "gpu-01" in each for each in fleet.remarks)


# -- judged ----------------------------------------------------------------------------------------


def event(what, at=CLOCK - 100, life=BEFORE, boot=BOOT, **more):
    return {"at": at, "boot": boot, "life": life, "what": what, **more}


def stage(rank=0, url="http://127.0.0.1:8000", **more):
    """One of on_node/serving/status.py's stages, which serves."""
    answers = (
        {"health": {"status": 200}, "models": ["llama"], "without_key": {"GET /v1/models": 401}}
        if url
        else {}
    )
    properties = {"ActiveState": "active", "NRestarts": "0", "InvocationID": NOW}
    return {
        "unit": UNIT,
        "model": "llama",
        "replica": 0,
        "rank": rank,
        "port": 8000,
        "gpus": ["GPU-a"],
        "release": "0.33.0-1f2e",
        "nodes": [],
        "served_name": "llama",
        "url": url,
        "keyed": True,
        "fingerprint": "f1",
        "seen": {"unit": properties, "started": "f1", "journal": [], **answers},
        "engines": {},
        "since": CLOCK - 60,
        "state": {"missing": "absent"},
        "events": [],
        "before": [],
        **more,
    }


def answer(*stages):
    return {"schema": 1, "boot_id": BOOT, "clock": CLOCK, "gpus": {"GPU-a": 3}, "stages": [*stages]}


def group(rank, **more):
    """A rank of two nodes, in its group."""
    state = {
        "schema": 1,
        "phase": "running",
        "why": "",
        "at": CLOCK - 3,
        "incarnation": {"id": "5a5a", "counter": 7, "since": CLOCK - 50},
        "last_end": None,
        **more,
    }
    nodes = ["gpu-01", "gpu-02"]
    return stage(rank, url="http://h:8000" if rank == 0 else None, state=state, nodes=nodes)


def seen(**more):
    """The look at a stage that is not as it should be."""
    return {**stage()["seen"], **more}


def judged(*answers):
    return fleet_status({f"gpu-0{n}": each for n, each in enumerate(answers, 1)}, {}, whole=False)


@each_row(
    ("look", "stand", "says"),
    [
        (seen(), Health.SERVES, ""),
        (seen(models=["other"]), Health.WRONG, "serves ['other']"),
        (
            seen(without_key={"GET /v1/models": 200}),
            Health.WRONG,
            "answers GET /v1/models without the API key with 200",
        ),
        (seen(started="f0"), Health.WRONG, "the unit file has changed since"),
        (seen(models_error={"error": "timed out"}), Health.WRONG, "/v1/models answers timed out"),
        (seen(key_error="[Errno 13] Permission denied: 'x'"), Health.UNKNOWN, "needs root"),
        (seen(unit={"error": "no systemd"}), Health.UNKNOWN, "no systemd"),
        (seen(unit={"ActiveState": "deactivating"}), Health.DOWN, "is being stopped"),
        (
            seen(unit={"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}),
            Health.DOWN,
            f"is stopped: run `systemctl start {UNIT}`",
        ),
        (
            seen(unit={"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "2"}),
            Health.DOWN,
            "refused its command line",
        ),
        (
            seen(unit={"ActiveState": "activating", "SubState": "auto-restart", "NRestarts": "3"}),
            Health.DOWN,
            "is activating",
        ),
    ],
)
def test_a_stage_serves_only_when_everything_about_it_is_right(look, stand, says):
    (replica,) = judged(answer(stage(seen=look))).replicas

    assert replica.health is stand
    assert says in "".join(replica.why)
    assert bool(replica.why) == (stand is not Health.SERVES)


def test_a_replica_over_nodes_serves_when_all_its_ranks_are_of_one_incarnation():
    fleet = judged(answer(group(0)), answer(group(1)))

    (replica,) = fleet.replicas
    assert (replica.health, replica.incarnation) == (Health.SERVES, "5a5a")
    assert [(rank.node, rank.health) for rank in replica.ranks] == [
        ("gpu-01", Health.SERVES),
        ("gpu-02", Health.RUNS),
    ]
    assert fleet.serves


def killed(stage):
    return {**stage, "seen": {**stage["seen"], "unit": {"ActiveState": "failed"}}}


@each_row(
    ("worker", "stand", "says"),
    [
        (answer(killed(group(1))), Health.DOWN, "rank 1 on gpu-02: vllm-llama-0.service is failed"),
        (
            answer(group(1, phase="waiting", why="for gpu-01")),
            Health.STARTS,
            "the rank is waiting: for gpu-01",
        ),
        (answer(group(1, phase="refused", why="release")), Health.WRONG, "refused: release"),
        (answer(group(1, at=CLOCK - 60)), Health.UNKNOWN, "has reported nothing for 60 s"),
        (
            answer(group(1, incarnation={"id": "4b4b", "counter": 6})),
            Health.WRONG,
            "different incarnations: rank 0 5a5a, rank 1 4b4b",
        ),
        (
            answer(),
            Health.UNKNOWN,
            "rank 1 on gpu-02: the node was not queried, or has no unit of the rank",
        ),
        ("cannot be reached: timed out", Health.UNKNOWN, "rank 1 on gpu-02: cannot be reached"),
    ],
)
def test_an_endpoint_that_answers_is_not_enough_for_a_replica_over_nodes(worker, stand, says):
    fleet = judged(answer(group(0)), worker)

    (replica,) = fleet.replicas
    assert replica.health is stand
    assert says in "".join(replica.why)
    assert not fleet.serves


def test_every_engine_that_has_a_server_of_its_own_must_be_healthy():
    ill = {"http://h:8001": {"status": 200}, "http://h:8002": {"error": "refused"}}
    (replica,) = judged(answer(stage(engines=ill))).replicas

    assert replica.health is Health.STARTS
    assert replica.why == ("vllm-llama-0.service: /health is not 200 yet on http://h:8002",)


def test_a_rank_with_a_server_an_engine_shows_all_of_their_ports():
    well = {f"http://127.0.0.1:{port}": {"status": 200} for port in (8001, 8002)}
    (replica,) = judged(answer(stage(engines=well))).replicas

    assert replica.ranks[0].ports == (8000, 8001, 8002)
    assert replica.as_json()["ranks"][0]["ports"] == [8000, 8001, 8002]


def test_the_ports_of_engines_are_those_after_the_first():
    server = ["--data-parallel-multi-port-external-lb", "--data-parallel-size-local", "3"]

    assert engines(server, 8000) == [8001, 8002]
    assert engines(server[1:], 8000) == []


def test_two_nodes_that_have_the_same_rank_are_not_two_replicas():
    (replica,) = judged(answer(stage()), answer(stage())).replicas

    assert replica.health is Health.WRONG
    assert "gpu-01 and gpu-02 both run rank 0" in replica.why[0]


@each_row(
    "broken",
    [
        {},
        {"schema": 2, "stages": []},
        answer({"model": "x"}),
        answer(3),
        answer(stage(seen=None)),
        answer(stage(since=1e30)),
    ],
)
def test_a_node_that_answers_nonsense_costs_the_others_nothing(broken):
    fleet = judged(broken, answer(stage()))

    assert "is invalid" in fleet.silent["gpu-01"]
    assert [replica.health for replica in fleet.replicas] == [Health.SERVES]
    assert not fleet.serves


# -- causes


def restart(**more):
    return judged(answer(stage(**more))).replicas[0].ranks[0].last_restart


FAILED = event("failed", unit_result="exit-code")
KILLED = event("exited", exit_code="killed", exit_status="9", signal="KILL")


@each_row(
    ("events", "cause"),
    [
        (
            [KILLED, event("failed", unit_result="signal"), event("restarts")],
            "killed by signal KILL",
        ),
        ([event("succeeded"), event("restarts")], "exit status 0"),
        (
            [KILLED, event("failed", unit_result="oom-kill"), event("restarts")],
            "out of memory",
        ),
        (
            [event("failed", unit_result="watchdog"), event("restarts")],
            "gave up on the unit (watchdog)",
        ),
        (
            [event("stops"), event("succeeded"), event("stopped")],
            "stopped by a deploy or by hand",
        ),
        (
            [event("stops"), KILLED, event("failed", unit_result="timeout")],
            "did not end cleanly",
        ),
        ([event("started", boot=EARLIER_BOOT)], "went down without a shutdown"),
        (
            [event("stops", boot=EARLIER_BOOT), event("stopped", boot=EARLIER_BOOT)],
            "shut down or rebooted",
        ),
    ],
)
def test_the_cause_of_the_last_restart_is_what_systemd_wrote_down(events, cause):
    found = restart(events=[event("exited", life="x"), *events, event("started", life=NOW)])

    assert cause in found.cause
    assert found.when == CLOCK - 100


def test_a_node_that_went_down_says_only_when_it_was_back():
    lives = [
        event("started", at=CLOCK - 9000, boot=EARLIER_BOOT),
        event("starts", life=NOW),
    ]

    assert restart(events=lives).when == CLOCK - 100


def test_a_server_that_ended_by_itself_is_asked_why():
    found = restart(
        events=[
            event("exited", exit_code="exited", exit_status="1"),
            event("restarts"),
        ],
        before=["INFO loading", "torch.OutOfMemoryError: CUDA out of memory"],
    )

    assert found.cause.startswith("exit status 1: GPU memory is full")


def test_a_stage_that_never_ended_has_no_last_restart():
    assert restart(events=[event("started", life=NOW)]) is None
    assert restart(events={"missing": "no_permission"}) is None


END = {"when": CLOCK - 99, "lived": 5, "why": "silent for 10 s", "rank": 1, "node": "gpu-02"}


@each_row(
    ("events", "cause"),
    [
        ([], "rank 1 on gpu-02: silent for 10 s"),
        (
            [event("exited", exit_code="exited", exit_status="1"), FAILED],
            "rank 1 on gpu-02: silent for 10 s",
        ),
        ([KILLED], "rank 1 on gpu-02: silent for 10 s (killed by signal KILL)"),
        ([event("stops", at=CLOCK - 9000)], "rank 1 on gpu-02: silent for 10 s"),
        ([event("stops", at=CLOCK - 1, life=BEFORE)], "stopped by a deploy or by hand"),
    ],
)
def test_a_rank_of_several_knows_which_rank_ended_its_group(events, cause):
    state = group(0)["state"]
    when = {"when": CLOCK - 9000} if cause.startswith("stopped") else {}
    found = restart(state={**state, "last_end": {**END, **when}}, events=events)

    assert found.cause == cause


# -- what is declared


def declared(**replicas):
    serving = {name: {"model": f"/srv/{name}", "replicas": n} for name, n in replicas.items()}
    vllm = {"version": "0.33.0", "lock": "x", "listen": "127.0.0.1"}
    return SimpleNamespace(settings=NodeSettings.model_validate({"vllm": vllm, "serving": serving}))


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [
        ({"llama": 1}, ()),
        ({"llama": "fit"}, ()),
        ({"llama": 2}, ("llama: 2 replicas declared, 1 found",)),
        ({"llama": 1, "qwen": "fit"}, ("qwen: 1 replica declared, none found",)),
    ],
)
def test_what_is_declared_and_not_there_does_not_serve(wanted, missing):
    fleet = fleet_status({"gpu-01": answer(stage())}, {"gpu-01": declared(**wanted)})

    assert fleet.missing == missing
    assert fleet.serves == (not missing)


def test_nodes_without_an_answer_may_have_the_missing_replicas_that_they_are_to_serve():
    answers = {"gpu-01": answer(stage()), "gpu-02": "timeout", "gpu-03": "timeout", "x": "timeout"}
    fleet = fleet_status(
        answers,
        {
            "gpu-01": declared(llama=1),
            "gpu-02": declared(qwen=1, llama=1),
            "gpu-03": declared(phi=1, qwen=1),
        },
    )
    assert fleet.may_have == {"phi": ("gpu-03",), "qwen": ("gpu-02", "gpu-03")}
    assert fleet.missing == (
        "phi: 1 replica declared, none found; some may be on gpu-03",
        "qwen: 1 replica declared, none found; some may be on gpu-02, gpu-03",
    )


def test_a_silent_node_that_is_not_to_serve_a_model_does_not_explain_its_missing_replicas():
    answers = {"gpu-01": answer(stage()), "mon-01": "timeout"}
    fleet = fleet_status(answers, {"gpu-01": declared(llama=2), "mon-01": declared(phi=1)})
    assert fleet.missing == (
        "llama: 2 replicas declared, 1 found",
        "phi: 1 replica declared, none found; some may be on mon-01",
    )


def with_adapters(*names):
    adapters = {name: {"source": f"/srv/{name}"} for name in names}
    served = Served.model_validate({"model": "/m", "replicas": 1, "adapters": adapters})
    settings = SimpleNamespace(servers=object(), serving={"llama": served})
    return SimpleNamespace(settings=settings)


def test_adapters_of_an_operators_own_flags_are_not_compared():
    served = Served.model_validate({"model": "/m", "flags": {"lora-modules": "sql=/srv/sql"}})
    declared = SimpleNamespace(
        settings=SimpleNamespace(servers=object(), serving={"llama": served})
    )
    found = fleet_status({"gpu-01": answer(loading("sql"))}, {"gpu-01": declared})
    assert found.remarks == ()
    assert found.replicas[0].health is Health.SERVES


def loading(*names, listed=None):
    models = ["llama", *(names if listed is None else listed)]
    return stage(adapters=[*names], adapters_named=True, seen=seen(models=models))


@each_row(
    "loads, listed, wanted, health, says",
    [
        (("a", "b"), None, ("a", "b"), Health.SERVES, ()),
        (
            ("a",),
            None,
            ("a", "b"),
            Health.SERVES,
            ("llama-0 does not load b, because `adapters` of",),
        ),
        (
            ("a", "c"),
            None,
            ("a",),
            Health.SERVES,
            ("llama-0 still loads c, because `adapters` of",),
        ),
        (("a",), None, ("b",), Health.SERVES, ("llama-0 does not load b and still loads a",)),
        (("a",), (), ("a",), Health.WRONG, ()),
        (("a",), ("a", "c"), ("a",), Health.WRONG, ()),
    ],
)
def test_a_server_lists_its_units_adapters_alone_and_the_declared_ones_are_compared(
    loads, listed, wanted, health, says
):
    found = fleet_status(
        {"gpu-01": answer(loading(*loads, listed=listed))}, {"gpu-01": with_adapters(*wanted)}
    )
    assert found.replicas[0].health is health
    assert found.adapters() == {loads: ["llama-0"]}
    assert found.as_json()["replicas"][0]["ranks"][0]["adapters"] == [*loads]
    for remark, text in zip(found.remarks, says, strict=True):
        assert remark.startswith(text)
    printed = io.StringIO()
    Console(file=printed, width=200).print(status_table(found, CLOCK))
    assert f"llama-0: adapter{'s' * (len(loads) > 1)} {', '.join(loads)}" in printed.getvalue()


def test_what_is_there_and_not_declared_is_a_remark():
    fleet = fleet_status({"gpu-01": answer(stage())}, {"gpu-01": declared()})

    assert fleet.remarks == ("llama is not declared any more, so the next deploy stops it",)
    assert fleet.serves


# -- shown


def text(fleet):
    console = Console(width=300, record=True, highlight=False, file=io.StringIO())
    console.print(status_table(fleet, CLOCK))
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_the_table_has_a_line_for_each_rank_and_says_what_is_amiss():
    last = {**END, "when": CLOCK - 7300}
    fleet = judged(answer(group(0, last_end=last)), answer(group(1, last_end=last)))

    lines = text(fleet)
    assert lines[1] == (
        "llama-0 0 gpu-01 serves 1 min 3 8000 0 2 h 1 min ago: rank 1 on gpu-02: silent for 10 s"
    )
    assert lines[2].startswith("llama-0 1 gpu-02 runs 1 min 3 - 0")
    assert "llama-0: 2 ranks of incarnation 7, 5a5a, 50 s old" in lines
    assert lines[-1] == "1 of 1 replicas serve"


def test_what_a_node_says_is_no_order_to_the_terminal():
    lines = text(judged(answer(stage(seen=seen(models=["\x1b]0;owned\x07"])))))

    assert not any("\x1b" in line for line in lines)
    assert any(r"\x1b]0;owned" in line for line in lines)


def test_json_has_every_rank_with_times_that_programs_read():
    found = judged(answer(group(0)), answer(group(1))).as_json()

    assert json.loads(json.dumps(found)) == found
    (replica,) = found["replicas"]
    assert replica["ranks"][0]["since"] == "2026-11-21T19:39:00Z"
    assert (found["serves"], replica["incarnation"]) == (True, "5a5a")


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def gpufleet(tmp_path):
    """`gpufleet(*arguments)`: run a command on an inventory of one node that nobody answers for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"ssh_hostname": "127.0.0.1", "ssh_port": server.getsockname()[1]}
    (tmp_path / "inventories").mkdir()
    (tmp_path / "inventories/x.py").write_text(
        "from gpufleet import inventory\n"
        f"globals().update(inventory.load(__file__, groups={{'gpu': [('gpu-01', {node!r})]}}))\n"
    )

    def run(command, *arguments):
        words = [command, "inventories/x.py", *arguments]
        return warm_command.run(words, cwd=tmp_path, connects=True)

    return run


def test_a_node_that_does_not_answer_is_unknown_and_that_is_not_serving(gpufleet):
    run = gpufleet("status", "--json")

    assert run.returncode == 1, run.stderr
    found = json.loads(run.stdout)
    assert "cannot be reached" in found["silent"]["gpu-01"]
    assert not found["serves"]
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("llama-0",), "no node that answered has llama-0"),
        (("llama",), "is not the name of a replica"),
    ],
)
def test_journals_that_cannot_be_read_are_a_sentence_and_status_2(gpufleet, arguments, says):
    run = gpufleet("logs", *arguments)

    assert run.returncode == 2
    assert says in run.stderr
    assert "Traceback" not in run.stderr


# -- out of service --------------------------------------------------------------------------------


def printed(fleet):
    console = Console(width=400, file=io.StringIO())
    console.print(status_table(fleet, CLOCK))
    return console.file.getvalue()


def test_who_has_taken_what_out_of_service_is_said_with_why_and_since_when():
    marked = {"change": {"lock": LOCK, "cordon": MARK, "drained": {"llama-0": MARK}}}
    fleet = judged({**answer(stage()), **marked}, {**answer(), **marked})
    text = printed(fleet)

    assert "gpu-01 cordoned 2 h ago by ann@desk: new fans" in text
    assert "llama-0 on gpu-01 drained 2 h ago by ann@desk: new fans" in text
    assert "serves, drained" in text
    assert "1 of 1 replicas serve; 1 drained" in text
    assert "ann@desk from desk:/srv/fleet, started 5 min ago: vLLM 0.32.0" in text
    assert "gpu-[01-02]" in text


def test_marks_are_there_for_programs():
    mark = {**MARK, "upgrade": LOCK["id"]}
    fleet = judged({**answer(stage()), "change": {"lock": LOCK, "cordon": mark, "drained": {}}})
    found = json.loads(json.dumps(fleet.as_json()))

    assert found["cordoned"] == [
        {
            "node": "gpu-01",
            "by": "ann@desk",
            "why": "new fans",
            "since": "2026-11-21T17:40:00Z",
            "upgrade": LOCK["id"],
        }
    ]
    assert found["drained"] == []
    (upgrade,) = found["upgrades"]
    assert (upgrade["id"], upgrade["nodes"]) == (LOCK["id"], ["gpu-01"])


def test_a_drained_replica_answers_all_the_same():
    """Whether replicas serve is one question, whether they get requests another one."""
    fleet = judged(
        {**answer(stage()), "change": {"lock": None, "cordon": None, "drained": {"llama-0": MARK}}}
    )

    assert fleet.serves


@each_row(
    "change",
    [
        [],
        {},
        {"lock": None, "cordon": {"by": "x"}, "drained": {}},
        {"lock": None, "cordon": {**MARK, "since": 1e300}, "drained": {}},
        {"lock": None, "cordon": MARK, "drained": ["llama-0"]},
        {"lock": {"missing": "no_permission"}, "cordon": None, "drained": {}},
    ],
)
def test_marks_that_make_no_sense_cost_no_other_answer(change):
    fleet = judged({**answer(stage()), "change": change})

    assert fleet.replicas[0].health is Health.SERVES
    assert fleet.out.cordoned == ()
    assert len([each for each in fleet.remarks if each.startswith("gpu-01: the cordon")]) == 1


@pytest.mark.parametrize(("known", "gpu"), [(True, "2"), (False, "GPU-a")])
def test_replicas_that_share_a_gpu_are_said_together(known, gpu):
    shared = [stage(unit=f"vllm-{model}-0.service", model=model) for model in ("chat", "embed")]
    for each in shared:
        each["gpus"] = ["GPU-a"]
    alone = stage(unit="vllm-large-0.service", model="large")
    alone["gpus"] = ["GPU-b"]
    told = answer(*shared, alone)
    told["gpus"] = {"GPU-a": 2, "GPU-b": 3} if known else {}
    found = fleet_status({"gpu-01": told}, {}, whole=False)
    assert found.shared_gpus() == {("gpu-01", gpu): ["chat-0", "embed-0"]}
    printed = io.StringIO()
    Console(file=printed, width=200).print(status_table(found, CLOCK))
    assert f"gpu-01 GPU {gpu}: shared by chat-0, embed-0" in printed.getvalue()
