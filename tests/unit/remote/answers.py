"""An answer of each program that nodes run for others to read: what is recorded, and who reads it.

A row has a program, an answer of it, and a function that reads the answer of node `gpu-07`. The
function raises nothing but `FleetError`, whatever the node prints.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from gpufleet.artifacts import distribution
from gpufleet.checks.finding import Report
from gpufleet.converge import content_diff, snapshot
from gpufleet.converge.desired import File
from gpufleet.doctor.journal_causes import kernel_causes
from gpufleet.doctor.node_evidence import node_evidence
from gpufleet.doctor.replica_speed import replica_speeds
from gpufleet.errors import FleetError
from gpufleet.flags import schema
from gpufleet.fleet import assessment, deploy_lock, fleet_plan, node_records
from gpufleet.fleet.upgrade_lock import lock_problems
from gpufleet.gpu_software import driver_activation, kernel_modules, kernel_tuning
from gpufleet.gpu_software.kernel_tuning import KernelSetting
from gpufleet.monitoring import silences
from gpufleet.network import firewall, haproxy
from gpufleet.node import probe_document
from gpufleet.node.machine import from_probe
from gpufleet.operations.remove_parts import removal_lines
from gpufleet.planning.multinode import reachability
from gpufleet.preflight import (
    alert_lines,
    network_lines,
    service_lines,
    storage_lines,
    tls_lines,
)
from gpufleet.preflight.network_lines import KnownNode
from gpufleet.preflight.storage_lines import WantedModel
from gpufleet.preflight.tls_lines import TlsServer
from gpufleet.progress import Amount
from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.serving.logs import Journals, format_lines
from gpufleet.serving.readiness import Endpoint
from gpufleet.serving.status import fleet_status
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.upgrade.gates import baseline
from gpufleet.upgrade.run import node_answers, node_locks
from gpufleet.upgrade.run.node_answers import NodeLook
from tests.support.checkout import ROOT
from tests.unit.gpu_software.test_driver_activation import HOLDER, NEW, document
from tests.unit.planning.multinode import test_reachability as reach
from tests.unit.preflight import sound_fleet
from tests.unit.serving import test_status as status

NODE = "gpu-07"
ID = "20261122T140000Z-ab12"
AT = 1795573697.4

Document = Mapping[str, Any] | str
Read = Callable[[Document], object]


class Row(NamedTuple):
    """One reader."""

    program: str
    """As `Payload.name` has it."""
    answer: dict[str, Any]
    read: Read


LOCK = {"id": ID, "owner": "ann", "from": "laptop:/f", "since": AT, "what": "vllm 0.33.0"}
DEPLOY = {**LOCK, "what": "deploys/vllm.py", "process": 4711, "pid": 812, "start": 1, "boot": "b"}
MARK = {"by": "ann@laptop", "why": "a disk makes noises", "since": AT, "upgrade": None}
SEEN = {
    "unit": {"ActiveState": "active", "SubState": "running", "NRestarts": "0"},
    "started": "abc",
    "journal": ["INFO one", "ERROR two"],
    "health": {"status": 200, "body": ""},
    "models": ["tiny", "sql"],
    "without_key": {"GET /v1/models": 401, "POST /invocations": 401},
    "adapters": {"sql": {"status": 200}},
}
DEAD = {
    **SEEN,
    "unit": {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "1"},
}
LOOK = {
    "schema": 1,
    "do": "look",
    "problem": None,
    "clock": AT,
    "boot_id": "6b149d9e3b774236a7e425d48e0be6ad",
    "lock": LOCK,
    "deploy": DEPLOY,
    "cordon": MARK,
    "drained": {"tiny-0": {**MARK, "upgrade": ID}},
    "next": {"plan": "p1", "units": {"vllm-tiny-0.service": "abd"}, "remove": []},
    "kept": [{"id": ID, "at": AT, "units": {"vllm-tiny-0.service": "abc"}}],
    "units": [
        {
            "unit": "vllm-tiny-0.service",
            "active": "active",
            "sub": "running",
            "since": AT,
            "started": "abc",
            "fingerprint": "abc",
            "release": "0.32.0-e28e5608c2",
            "restarts": 0,
        }
    ],
    "releases": [{"id": "0.32.0-e28e5608c2", "whole": True, "built": AT, "users": ["x"]}],
}
SWITCH = {
    "schema": 1,
    "do": "switch",
    "problem": None,
    "changed": ["vllm-tiny-0.service"],
    "unchanged": [],
    "removed": [],
    "cut": [],
    "stopped_at": AT,
    "down_at": AT,
    "started_at": AT,
    "clock": AT,
    "journal": ["one"],
}
READY = {
    "schema": 1,
    "do": "ready",
    "problem": None,
    "units": [
        {
            "unit": "vllm-tiny-0.service",
            "ready": False,
            "seconds": 3.5,
            "since": AT,
            "at": None,
            "served_name": "tiny",
            "fingerprint": "abc",
            "keyed": True,
            "adapters": ["sql"],
            "restarts": 0,
            "seen": DEAD,
        },
        {
            "unit": "vllm-wide-0.service",
            "ready": False,
            "seconds": 3.5,
            "since": None,
            "at": None,
            "served_name": None,
            "seen": DEAD,
        },
    ],
}
FILE = {"kind": "file", "mode": 420, "user": "root", "group": "root"}
SNAPSHOT = {
    "schema": 1,
    "files": {
        "/a": {**FILE, "sha256": "00"},
        "/b": {**FILE, "kind": "link", "target": "a"},
        "/c": None,
        "/d": {"error": "Permission denied"},
        "/e": {**FILE, "secret": 0},
    },
    "lines": {"/etc/hosts": ["127.0.0.1"]},
    "users": {
        "root": {"home": "/root", "shell": "/bin/sh", "group": "root", "groups": ["root"]},
        "x": None,
    },
    "groups": {"root": 0},
    "package_manager": "apt",
    "packages": {"bash": {"version": "5.2", "installed": True, "held": False}, "x": None},
    "packages_like": {"python3*": ["python3"]},
    "streams": {"nvidia-driver": None},
    "dpkg_unfinished": [],
    "units": {
        "ssh.service": {
            "load": "loaded",
            "active": "active",
            "sub": "running",
            "file_state": "enabled",
            "fragment": "/x",
            "needs_reload": False,
            "restarts": 0,
            "has_file": True,
            "on_disk": True,
            "started": None,
        },
        "x.service": {"error": "no bus"},
    },
    "units_like": {"vllm-*": []},
    "files_like": {"/etc/h*": ["/etc/hosts"]},
    "listings": {"/etc/apt": ["keyrings"], "/x": None},
    "leftovers": [],
}
STATUS = status.answer(status.group(0, last_end={"rank": 1, "node": "b", "why": "w", "when": AT}))
STATUS |= {"change": {"lock": LOCK, "cordon": MARK, "drained": {"llama-0": MARK}}}
STATUS["stages"][0]["events"] = [
    status.event("started"),
    status.event("exited", exit_code="exited", exit_status="1"),
    status.event("failed", unit_result="exit-code"),
]
JOURNAL = {
    "schema": 1,
    "here": ["tiny-0"],
    "rank": 0,
    "clock": 100_000_000,
    "lines": [[1_000_000, 7, 6, "one"], [2_000_000, 7, 6, "two"]],
    "more": False,
    "cursor": "s=1;i=a",
    "clocks": {"gpu-08": 1500.0},
}
EVIDENCE = {
    "schema": 1,
    "clock": AT,
    "boot": AT - 3600,
    "stages": {"tiny-0": [[1_000_000, 7, 6, "one"]], "wide-0": {"missing": "timeout"}},
    "units": {
        "tiny-0": {"drop_ins": ["/run/a.conf"], "reload": False, "signal": "KILL"},
        "wide-0": {"missing": "timeout"},
    },
    "models": {
        "tiny-0": {
            "directory": "/m",
            "complete": True,
            "missing": ["a.safetensors"],
            "changed": ["config.json"],
        },
        "wide-0": {"missing": "absent"},
    },
    "kernel": [[1_000_000, None, 3, "EXT4-fs error"]],
    "changes": [[AT - 60, "deploy: vllm"]],
    "certificates": [["/etc/gpufleet/gateway/tls.pem", "gateway", AT + 60]],
    "connections": {
        "wide-0": {"address": "10.1.0.1", "port": 29500, "error": "no answer within 2 s"},
        "tiny/gpu-07.tiny-0": {"address": "10.0.0.7", "port": 8000, "error": None},
    },
}
SPEEDS = {
    "schema": 1,
    "replicas": {
        "tiny-0": {
            "seconds": 3.0,
            "servers": {
                "http://127.0.0.1:8000": [
                    {"text": 'vllm:num_requests_running{engine="0"} 1.0'},
                    {"text": 'vllm:num_requests_running{engine="0"} 2.0'},
                ]
            },
        },
        "wide-0": {"missing": "timeout", "seconds": 11},
        "wide-1": {"seconds": 3.0, "servers": {"http://x": [{"error": "refused"}, {"text": ""}]}},
    },
}
SILENCE = {
    "id": "1",
    "status": {"state": "active"},
    "matchers": [{"name": "instance", "value": NODE, "isRegex": False, "isEqual": True}],
    "createdBy": f"{silences.MARK}upgrade {ID}, ann",
    "comment": "upgrade",
    "endsAt": "2026-11-22T15:00:00.000Z",
}
ANSWERS = {
    "schema": 1,
    "replicas": {
        "tiny-0": {
            "servers": {
                "http://127.0.0.1:8000": {
                    "golden": [[{"tokens": [1, 2], "text": "a", "error": ""}]],
                    "metrics": {"text": 'vllm:request_success_total{finished_reason="stop"} 3.0\n'},
                }
            }
        }
    },
    "alerts": {
        "error": None,
        "at": AT,
        "alerts": [
            {
                "labels": {"alertname": "VllmDown", "instance": NODE},
                "annotations": {"summary": "down"},
                "startsAt": "2026-11-22T10:00:00Z",
                "status": {"silencedBy": [], "inhibitedBy": []},
            }
        ],
    },
}
FLAGS = {
    "schema": schema.FORMAT,
    "vllm": "0.32.0",
    "flags": [
        {
            "name": "--port",
            "dest": "port",
            "group": "Frontend",
            "kind": "value",
            "type": "int",
            "default": 8000,
            "aliases": [],
            "choices": None,
        }
    ],
    "classes": {},
    "values": {},
    "env": {},
}
WIDE = [KernelSetting("vm.swappiness", 10, "why")]


def _documents(said: Document) -> dict[str, Any]:
    return {NODE: said}


def _named(read: Callable[[str, Document], object]) -> Read:
    return lambda said: read(NODE, said)


def _lock(said: Document) -> object:
    return node_locks.take(
        lambda asked: dict.fromkeys(asked, said),
        [NODE],
        upgrade="another",
        owner="bob",
        origin="x",
        what="y",
    )


def _hold(said: Document) -> object:
    problems, silent, remarks = deploy_lock.take(
        lambda names, _: dict.fromkeys(names, said),  # type: ignore[misc]
        [NODE],
        None,
    )
    if problems or silent:
        raise FleetError(*problems, *(f"{name}: {why}" for name, why in silent.items()))
    return remarks


def _snapshot(said: Document) -> object:
    asked = [("secret", "/e", "00"), ("file", "/a")]
    return snapshot.from_document({} if isinstance(said, str) else said, asked)


def _contents(said: Document) -> object:
    files = said if isinstance(said, str) else said["files"]
    file = File("/a", b"new\n")
    return list(content_diff.lines(file, files if isinstance(files, str) else files.get("/a")))


def _probe(said: Document) -> object:
    found = _documents(said)
    report: Report = assessment.check_nodes(found, {})
    if isinstance(said, str) or probe_document.document_problem(said):
        return report
    list(fleet_plan.running_stages(found))
    if problems := lock_problems(found, None):
        raise FleetError(*problems)
    return from_probe(said), driver_activation.driver_state(dict(said), None)


def _plan(said: Document) -> object:
    try:
        return assessment.plan_fleet(_documents(said), PLANNED).as_json()
    except FleetError as error:
        # What the model's own files say is of no node.
        if not str(error).startswith("serving.q: gpufleet does not know how much memory"):
            raise
        return error


def _status(said: Document) -> object:
    from gpufleet.cli.status_command import status_table

    found = fleet_status(_documents(said), {}, whole=False)
    return json.dumps(found.as_json()), status_table(found, AT)


def _journal(said: Document) -> object:
    journals = Journals("tiny-0", 10, {})
    # Another node has it.
    well = {**JOURNAL, "clocks": {}}
    return format_lines(journals.take({NODE: said, "gpu-08": well}), [NODE]), journals.notes


def _evidence(said: Document) -> object:
    """Also what is made of it: the kernel's lines by the rules."""
    found = node_evidence(NODE, said)
    tried = {name: str(each) for name, each in found.connections.items()}
    return kernel_causes(found, "inventories/prod.py"), found.last_change(AT, 3600), tried


def _answers(said: Document) -> object:
    golden = baseline.Golden(prompts=("a",), max_tokens=2)
    question = baseline.Question("tiny-0", (NODE,), golden)
    found = baseline.read_answers(_documents(said), [question], AT, [NODE])
    return baseline.traffic_between(None, found.readings["tiny-0"]).as_json()


def _endpoints(said: Document) -> object:
    from gpufleet.operations import verify_node, wait_ready

    endpoint = Endpoint("tiny-0", "vllm-tiny-0.service", "http://x", "tiny", "/k", 5, "abc")
    seen = {} if isinstance(said, str) else said
    wait_ready.allowed_restarts(seen)
    return verify_node.endpoint_problems([endpoint], [], seen)


def _gateway(said: Document) -> object:
    found = haproxy.parse_gateway_state(said)
    return sum(each.sessions + each.queued for each in found.servers), found.keys, found.configured


def _driver(said: Document) -> object:
    if isinstance(said, str) or said["error"]:
        return said
    found = driver_activation.driver_state(dict(said), None)
    waiting = [*said["kept"]["units"], *said["barred"]]
    return found, ", ".join(waiting), said["mark"] is None, set(said["kept"]["modules"])


def _modules(said: Document) -> object:
    if isinstance(said, str) or said["error"]:
        return said
    return (
        kernel_modules.module_problems(said, NEW),
        kernel_modules.kernels_without_module(said, NEW),
    )


def _kernel(said: Document) -> object:
    if isinstance(said, str):
        return said
    with refuse_malformed(NODE):
        found = kernel_tuning.problems(WIDE, said), kernel_tuning.changes(WIDE, said)
        return found, kernel_tuning.remarks(WIDE, said)


def _firewall(said: Document) -> object:
    return list(firewall.problems({} if isinstance(said, str) else said))


def _transfer(said: Document) -> object:
    return distribution.parse_look(said if isinstance(said, str) else dict(said))


def _copied(said: Document) -> object:
    if isinstance(said, str):
        return said
    return distribution.describe_sources(said), float(said.get("seconds") or 0)


def _progress(said: Document) -> object:
    if isinstance(said, str):
        return said
    amount = Amount()
    amount.record(1.0, said["bytes"] or 0, said["total"])
    return amount.text()


def _preflight(said: Document) -> object:
    looks = {**reach.seen(), "gpu-02": said}
    return reachability.compare(reach.REPLICA, reachability.check_preflights(looks), reach.talk())


def _exchange(said: Document) -> object:
    return reachability.compare(reach.REPLICA, reach.seen(), {**reach.talk(), "gpu-02": said})


def _targets(said: Document) -> object:
    if isinstance(said, str):
        return said
    return [each["targets"] for files in said["files"].values() for each in files]


def _schema(said: Document) -> object:
    if isinstance(said, str) or "refused" in said:
        return said
    try:
        with refuse_malformed(NODE):
            return schema.from_document(said)
    except FleetError as error:  # `accept_flags` names the node, too
        raise FleetError(f"{NODE}: {error}") from error


PROBE = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/a100x2-pcie.json").read_text())
CONFIG = json.loads((ROOT / "tests/data/models/Qwen--Qwen3-32B.json").read_text())["config"]
ABSENT = {"missing": "absent"}
PROBE["models"] = {
    "/srv/q": {
        "config": CONFIG,
        **dict.fromkeys(("hf_quant_config", "adapter_config", "bytes"), ABSENT),
    }
}
PROBE["files"] = {"/srv/chat.jinja": "file", "/srv/gone": ABSENT}
PROBE["stages"] = [
    {
        "unit": "vllm-q-0.service",
        "model": "q",
        "replica": 0,
        "rank": 0,
        "port": 8000,
        "gpus": [PROBE["gpus"][0]["uuid"], PROBE["gpus"][1]["uuid"]],
        "side_channel": 0,
        "release": "0.32.0-e28e5608c2",
        "arguments": ['"--model"'],
    }
]
PLANNED: Any = {
    NODE: SimpleNamespace(
        groups=(),
        settings=NodeSettings.model_validate(
            {
                "vllm": {"version": "0.32.0", "lock": "locks/none.txt", "listen": "127.0.0.1"},
                "serving": {"q": {"model": "/srv/q", "context": 8192, "replicas": 1}},
            }
        ),
        origins={},
    )
}
PROBE |= {"upgrade": LOCK, "cordon": {**MARK, "passing": False}}
DRIVER = {
    **{key: document(NEW, NEW)[key] for key in ("kernel", "driver", "system")},
    "schema": 1,
    "error": "",
    "boot_id": "6b14",
    "holders": [HOLDER],
    "used_by": [],
    "active": ["vllm-a-0.service"],
    "kept": {"units": [], "modules": []},
    "barred": [],
    "mark": None,
}
MODULES = {
    "schema": 1,
    "error": "",
    "kernels": copy.deepcopy(DRIVER["driver"]["kernels"]),
    "secure_boot": True,
    "enrolled": False,
    "said": {},
}


def _look_around(said: Document) -> object:
    """Read a look as all lines of a preflight do; what it lacks is a line, no error."""
    answer = said if isinstance(said, str) else dict(said)
    looks = {NODE: answer, sound_fleet.FRONT: answer}
    settings = dict.fromkeys(looks, sound_fleet.front_settings())
    server = TlsServer(
        sound_fleet.FRONT, sound_fleet.FRONT, "gateway.port", "a", 1, None, "x", by_name=False
    )
    model = WantedModel("qwen", sound_fleet.MODEL_DIRECTORY, from_hub=True, files=None)
    lines = (
        *service_lines.service_lines(looks, settings, "INVENTORY"),
        *tls_lines.tls_lines(looks, (server,), settings, sound_fleet.NOW),
        *alert_lines.alert_lines(looks, settings, {}, "INVENTORY"),
        *storage_lines.model_lines(looks, {NODE: (model,)}, "INVENTORY"),
        *network_lines.name_lines(looks, {"gpu-01": KnownNode("a.example")}, {}),
        *network_lines.source_lines(looks, {NODE: {"source": "http://a"}}, {}, "INVENTORY"),
    )
    return [each.as_json() for each in lines]


ROWS = (
    Row("change/change look", LOOK, _named(NodeLook.read)),
    Row("change/change lock", {**LOOK, "before": None, "ours": False}, _lock),
    Row("change/change cordon", {**LOOK, "changed": ["cordon"]}, _named(node_answers.Marks.read)),
    Row(
        "change/change quiet",
        {"schema": 1, "problem": None, "left": {"http://x": 3, "http://y": None}, "seconds": 2.0},
        _named(lambda node, said: node_answers.RequestsLeft.read(node, said).quiet),
    ),
    Row(
        "change/change switch",
        SWITCH,
        _named(lambda node, said: node_answers.SwitchAnswer.read(node, said).gap),
    ),
    Row(
        "change/change ready",
        READY,
        _named(lambda node, said: node_answers.ReadyAnswer.read(node, said).why),
    ),
    Row(
        "change/change collect",
        {"schema": 1, "problem": None, "removed": ["a"], "stays": {"b": "u"}, "freed_bytes": 7},
        _named(node_answers.CollectAnswer.read),
    ),
    Row(
        "change/hold",
        {
            "schema": 1,
            "problem": None,
            "held": False,
            "lock": LOCK,
            "deploy": DEPLOY,
            "why": "it is no sshd",
        },
        _hold,
    ),
    Row("common/unit_journal", JOURNAL, _journal),
    Row("converge/read_files", {"schema": 1, "files": {"/a": {"content": "b2xk"}}}, _contents),
    Row(
        "converge/reload_config look",
        {"error": None, "active": True, "in_force": True},
        lambda said: said if isinstance(said, str) else (said["error"], said["in_force"]),
    ),
    Row(
        "converge/remove",
        {
            "schema": 1,
            "error": "",
            "found": {
                "units": ["vllm-tiny-0.service"],
                "packages": ["haproxy"],
                "tables": ["inet gpufleet"],
                "paths": ["/opt/vllm"],
                "accounts": ["vllm"],
            },
        },
        lambda said: said if isinstance(said, str) else list(removal_lines(said["found"])),
    ),
    Row("converge/snapshot", SNAPSHOT, _snapshot),
    Row(
        "converge/sysctl",
        {
            "schema": 1,
            "applied": True,
            "settings": {"vm.swappiness": {"value": 60, "later": {"file": "/f", "value": 3}}},
        },
        _kernel,
    ),
    Row(
        "converge/validate_config",
        {"error": "line 3"},
        lambda said: said if isinstance(said, str) else (said["error"] or "").splitlines(),
    ),
    Row("flags/schema", FLAGS, _schema),
    Row("doctor/failure_evidence", EVIDENCE, _evidence),
    Row("doctor/replica_metrics", SPEEDS, lambda said: replica_speeds(_documents(said))),
    Row("gpu_software/driver_reload look", DRIVER, _driver),
    Row(
        "gpu_software/driver_reload reload",
        {"schema": 1, "error": "held", "busy": True},
        lambda said: said if isinstance(said, str) else (said["error"], said.get("busy")),
    ),
    Row("gpu_software/kernel_modules look", MODULES, _modules),
    Row("gpu_software/kernel_modules build", {**MODULES, "said": {"6.8": "no"}}, _modules),
    Row(
        "monitoring/record",
        {"schema": 1, "error": "full", "recorded": ["check.prom"]},
        lambda said: node_records.record_failures(_documents(said), "it is"),
    ),
    Row(
        "monitoring/silences",
        {"error": None, "opened": [], "silences": [SILENCE]},
        _named(silences.read_answer),
    ),
    Row(
        "monitoring/target_files",
        {"files": {"targets/vllm.json": [{"targets": ["a:1"], "labels": {"a": "b"}}]}},
        _targets,
    ),
    Row(
        "network/firewall look",
        {
            "schema": 1,
            "error": "",
            "installed": True,
            "user": True,
            "loaded": "table inet gpufleet {\n}",
            "canonical": "table inet gpufleet {\n x\n}",
            "saved": True,
            "pending": False,
            "service": "active",
        },
        _firewall,
    ),
    Row(
        "network/firewall apply",
        {"schema": 1, "error": ""},
        lambda said: said if isinstance(said, str) else said["error"],
    ),
    Row(
        "network/gateway_drains show",
        {
            "schema": 1,
            "error": None,
            "runs": True,
            "fingerprint": "f",
            "servers": [
                {
                    "backend": "tiny",
                    "server": "gpu-07.tiny-0",
                    "status": "UP",
                    "sessions": 3,
                    "queued": 0,
                    "drained": False,
                }
            ],
            "drained": ["tiny/gpu-07.tiny-0"],
            "unknown": [],
            "configured": {"tiny/gpu-07.tiny-0": ["10.0.0.7", 8000]},
            "models": ["tiny"],
            "keys": {"tiny": "00"},
        },
        _gateway,
    ),
    Row(
        "packages/transaction_progress",
        {"schema": 1, "step": "download", "bytes": 3, "total": 7, "line": None},
        _progress,
    ),
    Row(
        "preflight/alert_receipt",
        {"schema": 1, "error": None, "before": sound_fleet.counts(1), "after": ""},
        lambda said: alert_lines.read_receipt(NODE, said),
    ),
    Row("preflight/node_look", sound_fleet.look(sound_fleet.FRONT), _look_around),
    Row("probe/probe", PROBE, _probe),
    Row("probe/probe plan", {**PROBE, "upgrade": None}, _plan),
    Row("reach/preflight", reach.look(), _preflight),
    Row("reach/reach", reach.talk()["gpu-02"], _exchange),
    Row(
        "serving/endpoints",
        {
            "schema": 1,
            "stages": {"tiny-0": SEEN},
            "metrics": {"node": {"unit": {"ActiveState": "active"}, "status": 200}},
        },
        _endpoints,
    ),
    Row("serving/replica_answers", ANSWERS, _answers),
    Row("serving/status", STATUS, _status),
    Row(
        "transfer/build_progress",
        {"schema": 1, "step": "install", "bytes": 3, "total": 7, "left": ["a"]},
        _progress,
    ),
    Row("transfer/folder_size", {"schema": 1, "bytes": 3, "total": None}, _progress),
    Row(
        "transfer/transfer look",
        {"schema": 1, "error": "", "whole": True, "kind": ["debian 12", "x86_64", "3.11"]},
        _transfer,
    ),
    Row(
        "transfer/transfer fetch",
        {
            "schema": 1,
            "error": "",
            "bytes": 1,
            "found": 3,
            "sent": 0,
            "seconds": 0.3,
            "port": 1,
            "remarks": ["one"],
            "from": {"a": 3 << 30},
        },
        _copied,
    ),
)
