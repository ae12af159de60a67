"""What is wrong with a fleet is named worst first, each cause before what follows from it."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

import pytest

from gpufleet.checks.finding import Action, Finding, GpuId, Report, Severity, Step
from gpufleet.doctor.fleet_diagnosis import Impact, Problem, worst_first
from gpufleet.doctor.fleet_problems import (
    diagnose,
    journals_to_read,
    problems_of,
    ranks_to_connect,
)
from gpufleet.doctor.gateway_problems import servers_to_connect
from gpufleet.doctor.node_evidence import (
    Certificate,
    Connection,
    NodeEvidence,
    PlacedModel,
    UnitDifference,
)
from gpufleet.doctor.observations import Alert, FleetObservations, LogCause
from gpufleet.doctor.planned_memory import RULES, planned_sizes, short_of_memory, size_sentence
from gpufleet.errors import FleetError
from gpufleet.failures.rule_file import rules
from gpufleet.fleet.assessment import plan_fleet
from gpufleet.network.haproxy import GatewayState, ServerState
from gpufleet.node.marks import Lock, Mark
from gpufleet.serving.out_of_service import Change, OutOfService
from gpufleet.serving.rank_status import Health, LastRestart, RankStatus
from gpufleet.serving.status import FleetStatus, ReplicaStatus
from gpufleet.sizing.options import Sizing
from tests.support.rows import each_row
from tests.unit.report.sample_fleet import declared, probes

NOW = 1_795_290_000.0
GPU = GpuId(3, "GPU-3", "0000:18:00.0")
LOST = Finding(
    "gpu-answers",
    "gpu-01",
    Severity.BLOCK,
    "does not answer",
    remedy=(Step(Action.DRAIN, "stop what uses it"), Step(Action.REBOOT, "`reboot`")),
    gpu=GPU,
)
OUT_OF_MEMORY = LogCause(
    "the KV cache does not fit",
    "lower `max-model-len`",
    "CUDA out of memory",
    "rank 0 on gpu-01",
    "vllm",
    NOW - 600,
)
HUNG = LogCause("a disk hangs", "reboot", "task blocked", "kernel of gpu-01", "host", NOW - 650)


def replica(name="llama-0", node="gpu-01", health=Health.SERVES, why=(), **rank):
    model, _, number = name.rpartition("-")
    ranks = (RankStatus(node, 0, health, **rank),)
    return ReplicaStatus(model, int(number), ranks, health, tuple(why))


DOWN = replica(
    health=Health.DOWN, why=["vllm-llama-0.service ended"], since=NOW - 500, gpus=("GPU-3",)
)
OTHER = replica("llama-1", "gpu-02")


def status(*replicas, **more):
    return FleetStatus(replicas, more.pop("silent", {}), **more)


def observed(*replicas, findings=(), **more):
    nodes = ("gpu-01", "gpu-02")
    keys = ("silent", "missing", "out", "may_have")
    of_status = {key: more.pop(key) for key in keys if key in more}
    return FleetObservations(
        status(*replicas, **of_status), Report(tuple(findings), {}, nodes), **more
    )


def found(seen):
    return diagnose(seen, NOW, "inventories/prod.py")


def subjects(seen):
    return [each.subject for each in found(seen).problems]


def test_a_fleet_that_serves_has_no_problem():
    said = found(observed(replica(), OTHER))
    assert (said.problems, said.status) == ((), 0)
    assert said.serving == ("llama: 2 of 2 replicas serve",)


def test_the_last_replica_of_a_model_is_an_outage_and_another_is_not():
    one, two = found(observed(DOWN)).problems[0], found(observed(DOWN, OTHER)).problems[0]
    assert (one.impact, two.impact) == (Impact.OUTAGE, Impact.DEGRADED)


def test_a_broken_gpu_is_named_before_the_replica_that_it_took_down():
    said = found(observed(DOWN, OTHER, findings=[LOST])).problems
    assert [each.subject for each in said] == ["check gpu-answers on gpu-01", "llama-0"]
    assert said[1].because == said[0].subject
    assert said[0].do == "stop what uses it\n`reboot`"
    assert said[0].page == "docs/checks/gpu-answers.md"


@each_row(
    ("finding", "log"),
    [
        (replace(LOST, gpu=GpuId(5, "GPU-5")), None),
        (replace(LOST, severity=Severity.UNKNOWN), None),
        (replace(LOST, node="gpu-02"), None),
        (LOST, OUT_OF_MEMORY),
    ],
    ids=["a GPU that it does not use", "not checked", "another node", "a cause of its own"],
)
def test_what_did_not_take_a_replica_down_is_not_named_as_its_cause(finding, log):
    logs = {"llama-0": [log]} if log else {}
    said = found(observed(DOWN, OTHER, findings=[finding], logs=logs)).problems
    assert [(each.subject, each.because) for each in said if each.subject == "llama-0"] == [
        ("llama-0", "")
    ]


def test_a_driver_error_in_the_log_is_explained_by_the_nodes_broken_gpu():
    log = replace(OUT_OF_MEMORY, component="cuda")
    said = found(observed(DOWN, OTHER, findings=[LOST], logs={"llama-0": [log]})).problems
    assert [each.subject for each in said] == ["check gpu-answers on gpu-01", "llama-0"]


def test_the_kernels_log_explains_what_ended_then_and_not_hours_later():
    def because(at):
        kernels = {"gpu-01": [replace(HUNG, at=at)]}
        last = LastRestart(NOW - 600, "killed by signal KILL")
        down = replace(DOWN, ranks=(replace(DOWN.ranks[0], last_restart=last),))
        said = found(observed(down, OTHER, kernels=kernels)).problems
        return next(each.because for each in said if each.subject == "llama-0")

    assert because(NOW - 650) == "kernel of gpu-01"
    assert because(NOW - 7200) == because(NOW) == ""


def test_a_check_that_fails_on_a_node_that_serves_is_no_loss_yet():
    assert found(observed(replica(), OTHER, findings=[LOST])).problems[0].impact is Impact.RISK


def test_one_check_of_many_gpus_is_one_problem():
    many = [replace(LOST, gpu=replace(GPU, index=index)) for index in range(8)]
    said = found(observed(DOWN, OTHER, findings=many)).problems
    assert len(said) == 2
    assert said[0].what.startswith("gpu-01 GPU 0: does not answer")
    assert "and 7 more" in said[0].what


def test_what_is_accepted_or_follows_from_another_check_is_not_named():
    findings = [
        replace(LOST, accepted="until the 3rd"),
        replace(LOST, check="ecc-mode", severity=Severity.UNKNOWN, cause="gpu-answers"),
        replace(LOST, check="clock", severity=Severity.INFO),
    ]
    assert subjects(observed(replica(), OTHER, findings=findings)) == []


def test_a_line_of_the_log_is_the_cause_and_says_what_to_do():
    said = found(observed(DOWN, OTHER, logs={"llama-0": [OUT_OF_MEMORY]})).problems[0]
    assert (said.cause, said.do) == (OUT_OF_MEMORY.cause, OUT_OF_MEMORY.do)
    assert "rank 0 on gpu-01, 2026-11-21T19:30:00Z: CUDA out of memory" in "\n".join(said.evidence)


def test_without_a_known_line_the_logs_are_what_to_look_at():
    said = found(observed(DOWN, OTHER)).problems[0]
    assert said.cause == ""
    logs, drift = said.do.splitlines()
    assert logs == "`gpufleet logs inventories/prod.py llama-0 --lines 300`"
    assert drift.startswith("`gpufleet drift inventories/prod.py --limit gpu-01`")


def test_what_was_added_to_a_unit_is_named_with_what_undoes_it():
    unit = UnitDifference(("/run/systemd/system/vllm-llama-0.service.d/x.conf",), reload=True)
    evidence = {"gpu-01": NodeEvidence("gpu-01", units={"llama-0": unit, "llama-1": unit})}
    said = found(observed(DOWN, OTHER, evidence=evidence, logs={"llama-0": [OUT_OF_MEMORY]}))
    assert [each for each in said.problems[0].evidence if " unit " in each] == [
        "gpu-01: the replica's unit has drop-ins that gpufleet did not write: "
        "/run/systemd/system/vllm-llama-0.service.d/x.conf",
        "gpu-01: the file of the replica's unit was changed, but systemd has not reloaded it",
    ]
    first, second = said.problems[0].do.splitlines()
    assert first.startswith("`systemctl cat vllm-llama-0`")
    assert second == OUT_OF_MEMORY.do


def test_a_process_that_the_kernel_killed_explains_its_own_unit_alone():
    def because(unit):
        line = f"oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/system.slice/{unit},task=python3"
        kernels = {"gpu-01": [replace(HUNG, line=line, at=NOW - 500)]}
        said = found(observed(DOWN, OTHER, kernels=kernels)).problems
        return next(each.because for each in said if each.subject == "llama-0")

    assert because("vllm-llama-0.service") == "kernel of gpu-01"
    assert because("vllm-llama-01.service") == because("backup.service") == ""


def test_what_was_changed_before_it_began_is_evidence_and_what_came_later_is_not():
    evidence = NodeEvidence(
        "gpu-01",
        boot=NOW - 90 * 86400,
        changes=((NOW - 720, "packages: upgrade nvidia-driver"), (NOW - 60, "deploy: vllm")),
    )
    seen = observed(DOWN, OTHER, logs={"llama-0": [OUT_OF_MEMORY]}, evidence={"gpu-01": evidence})
    said = found(seen).problems[0].evidence
    assert "gpu-01: 2 min before: packages: upgrade nvidia-driver" in said
    assert not any("deploy: vllm" in each or "booted" in each for each in said)


def test_a_replica_that_came_back_within_the_hour_is_a_risk_and_later_it_is_none():
    def back(seconds):
        last = LastRestart(NOW - seconds, "killed by signal KILL")
        return replica(restarts=1, last_restart=last)

    said = found(observed(back(600), OTHER)).problems
    assert [(each.impact, each.cause) for each in said] == [(Impact.RISK, "killed by signal KILL")]
    assert subjects(observed(back(7200), OTHER)) == []


def test_a_restart_by_a_deploy_is_no_problem():
    last = LastRestart(NOW - 60, "stopped by a deploy or by hand")
    assert subjects(observed(replica(restarts=0, last_restart=last), OTHER)) == []


def test_a_node_that_does_not_answer_is_named_before_its_replica():
    down = replica(health=Health.UNKNOWN, why=["rank 0 on gpu-01: no answer"])
    said = found(observed(down, OTHER, silent={"gpu-01": "no answer in time"})).problems
    assert [each.subject for each in said] == ["gpu-01", "llama-0"]


def test_a_silent_node_is_the_cause_of_replicas_that_are_missing():
    missing = ("llama: 2 replicas declared, none found",)
    may_have = {"llama": ("gpu-01",)}
    seen = observed(silent={"gpu-01": "no answer"}, missing=missing, may_have=may_have)
    said = found(seen).problems
    assert [(each.subject, each.because) for each in said] == [
        ("gpu-01", ""),
        ("llama (replicas)", "gpu-01"),
    ]


def test_of_two_silent_nodes_each_is_the_cause_of_the_models_that_it_is_declared_to_serve():
    silent = {"gpu-01": "no answer", "gpu-02": "no answer", "gpu-03": "no answer"}
    models = ("llama", "phi", "qwen")
    missing = tuple(f"{model}: 1 replica declared, none found" for model in models)
    may_have = {"llama": ("gpu-02",), "phi": (), "qwen": ("gpu-01", "gpu-02")}
    said = {
        each.subject: each
        for each in found(observed(silent=silent, missing=missing, may_have=may_have)).problems
    }
    because = {name: each.because for name, each in said.items()}
    assert because == {
        "gpu-01": "",
        "gpu-02": "",
        "gpu-03": "",
        "llama (replicas)": "gpu-02",
        "phi (replicas)": "",
        "qwen (replicas)": "gpu-01",
    }
    impacts = [said[node].impact for node in silent]
    assert impacts == [Impact.DEGRADED, Impact.DEGRADED, Impact.RISK]
    assert said["qwen (replicas)"].evidence == (
        "nodes that are declared for this model but do not answer: gpu-01, gpu-02",
    )


def test_a_replica_that_people_drained_is_no_loss():
    mark = Mark("ann", "fans", NOW - 60, None)
    out = OutOfService(drained=(("llama-0", "gpu-01", mark),))
    said = found(observed(DOWN, OTHER, out=out)).problems[0]
    assert said.impact is Impact.NOTICE
    assert said.what == "llama-0 down; it is drained"


def test_a_cordon_and_an_upgrade_that_has_not_ended_are_named_with_their_commands():
    mark, lock = Mark("ann", "fans", NOW - 7200, None), Lock("u1", "ann", "desk", NOW - 300, "0.33")
    out = OutOfService((("gpu-01", mark),), (), (Change(lock, ("gpu-02",)),))
    said = found(observed(replica(), OTHER, out=out)).problems
    assert [each.do for each in said] == [
        "`gpufleet upgrade inventories/prod.py --resume`, or "
        "`gpufleet rollback inventories/prod.py`",
        "`gpufleet uncordon inventories/prod.py gpu-01` when the node is healthy again",
    ]


def server(name, state, **more):
    return ServerState("llama", name, state, 0, 0, **{"drained": False, **more})


def gateway(*servers, **more):
    return GatewayState(runs=True, servers=servers, **more)


def test_a_gateway_that_does_not_reach_what_serves_is_named():
    lb = gateway(server("gpu-01.llama-0", "DOWN"), server("gpu-02.llama-1", "UP"))
    said = found(observed(replica(), OTHER, gateways={"lb-01": lb})).problems
    assert [(each.subject, each.impact) for each in said] == [
        ("gateway lb-01, llama/gpu-01.llama-0", Impact.DEGRADED)
    ]


@each_row(
    ("error", "cause", "do"),
    [
        (
            "no answer within 2 s",
            "lb-01 cannot reach the server",
            "drift inventories/prod.py --limit lb",
        ),
        (
            "No route to host",
            "lb-01 cannot reach the server",
            "drift inventories/prod.py --limit lb",
        ),
        ("Connection refused", "no program listens on this port", "gpufleet deploy gateway"),
        (None, "its check of /health fails", "curl -i http://10.0.0.1:8000/health` on lb-01"),
    ],
)
def test_a_connection_from_the_gateway_tells_why_a_server_gets_nothing(error, cause, do):
    place = {"llama/gpu-01.llama-0": ("10.0.0.1", 8000)}
    lb = gateway(server("gpu-01.llama-0", "DOWN"), server("gpu-02.llama-1", "UP"), configured=place)
    tried = {"llama/gpu-01.llama-0": Connection("10.0.0.1", 8000, error)}
    evidence = {"lb-01": NodeEvidence("lb-01", connections=tried)}
    (said,) = found(observed(replica(), OTHER, gateways={"lb-01": lb}, evidence=evidence)).problems
    assert cause in said.cause
    assert do in said.do
    assert said.evidence == (f"lb-01 to 10.0.0.1 port 8000: {error or 'connected'}",)


def test_ports_are_tried_of_servers_that_get_nothing_and_are_not_drained():
    places = {f"llama/gpu-0{n}.llama-{n}": (f"10.0.0.{n}", 8000) for n in range(4)}
    lb = gateway(
        server("gpu-00.llama-0", "UP 1/3"),
        server("gpu-01.llama-1", "DOWN"),
        server("gpu-02.llama-2", "MAINT", drained=True),
        server("gpu-09.llama-9", "DOWN"),
        configured=places,
    )
    assert servers_to_connect(lb) == {"llama/gpu-01.llama-1": ("10.0.0.1", 8000)}


def wide(*healths, stopped=False):
    ranks = tuple(
        RankStatus(f"gpu-0{n + 1}", n, health, since=NOW - 500, stopped=stopped)
        for n, health in enumerate(healths)
    )
    return ReplicaStatus("wide", 0, ranks, max(healths, key=[*Health].index), ("it waits",))


def test_only_ranks_that_are_amiss_connect_to_their_rank_0():
    both = wide(Health.STARTS, Health.DOWN)
    assert ranks_to_connect(status(both)) == {"gpu-02": ("wide-0",)}
    assert ranks_to_connect(status(wide(Health.SERVES, Health.RUNS))) == {}
    assert ranks_to_connect(status(wide(Health.DOWN, Health.DOWN, stopped=True))) == {}
    assert ranks_to_connect(status(DOWN)) == {}


@each_row(
    ("error", "cause", "evidence"),
    [
        (
            "no answer within 2 s",
            "the replica's nodes cannot reach each other",
            "no answer within 2 s",
        ),
        ("No route to host", "the replica's nodes cannot reach each other", "No route to host"),
        ("Connection refused", "", "Connection refused (no program listens on this port)"),
        (None, "", "connected"),
    ],
)
def test_a_ranks_connection_to_rank_0_tells_whether_the_network_is_the_cause(
    error, cause, evidence
):
    tried = {"wide-0": Connection("10.1.0.1", 29500, error)}
    seen = {"gpu-02": NodeEvidence("gpu-02", connections=tried)}
    (said,) = found(observed(wide(Health.STARTS, Health.STARTS), evidence=seen)).problems
    assert said.cause.startswith(cause)
    assert bool(said.cause) == bool(cause)
    assert f"gpu-02 to rank 0 on gpu-01, 10.1.0.1 port 29500: {evidence}" in said.evidence
    command = "`gpufleet reach inventories/prod.py wide-0`"
    assert said.do.startswith(command) == bool(cause)


def test_a_lost_connection_stands_before_what_a_rank_logged_because_of_it():
    tried = {"wide-0": Connection("10.1.0.1", 29500, "no answer within 2 s")}
    seen = {"gpu-02": NodeEvidence("gpu-02", connections=tried)}
    log = replace(OUT_OF_MEMORY, cause="a rank did not take part", component="nccl", do="look")
    said = found(
        observed(wide(Health.DOWN, Health.DOWN), evidence=seen, logs={"wide-0": [log]})
    ).problems[0]
    assert said.cause == (
        "the replica's nodes cannot reach each other, because of a firewall, route, switch or "
        "cable: a rank did not take part"
    )
    assert said.do.splitlines()[1] == "look"


def test_a_node_that_does_not_answer_is_the_cause_and_not_the_network():
    tried = {"wide-0": Connection("10.1.0.1", 29500, "no answer within 2 s")}
    seen = {"gpu-02": NodeEvidence("gpu-02", connections=tried)}
    silent = {"gpu-01": "not reached"}
    said = found(observed(wide(Health.UNKNOWN, Health.DOWN), evidence=seen, silent=silent)).problems
    assert [each.subject for each in said] == ["gpu-01", "wide-0"]
    assert said[1].because == "gpu-01"
    assert "reach each other" not in said[1].cause


def test_a_server_is_of_the_replica_with_its_whole_name():
    ten = replica("llama-10", "gpu-01", Health.DOWN, gpus=("GPU-1",))
    lb = gateway(server("gpu-01.llama-10", "DOWN"), server("gpu-01.llama-1.1", "UP"))
    one = replica("llama-1", "gpu-01")
    assert subjects(observed(ten, one, gateways={"lb-01": lb})) == ["llama-10"]
    said = found(observed(ten, one, gateways={"lb-01": lb}))
    assert problems_of(said, "llama-1", status(ten, one), ("gpu-01",)).problems == ()


def test_a_gateway_that_cannot_be_asked_is_not_known_to_be_down():
    said = found(observed(replica(), gateways={"lb-01": "no answer"})).problems
    assert [each.impact for each in said] == [Impact.RISK]
    assert "it is unknown" in said[0].what


def test_only_what_concerns_a_name_is_kept_with_its_cause():
    said = found(observed(DOWN, OTHER, findings=[LOST]))
    seen = status(DOWN, OTHER)
    kept = problems_of(said, "llama-0", seen, ("gpu-01", "gpu-02")).problems
    assert [each.subject for each in kept] == ["check gpu-answers on gpu-01", "llama-0"]
    assert problems_of(said, "gpu-02", seen, ("gpu-01", "gpu-02")).problems == ()
    with pytest.raises(FleetError, match="did you mean"):
        problems_of(said, "llama-00", seen, ("gpu-01",))


def test_a_gateway_without_servers_follows_from_the_replicas_that_are_down():
    lb = gateway(server("gpu-01.llama-0", "DOWN"))
    assert subjects(observed(DOWN, gateways={"lb-01": lb})) == ["llama-0", "gateway lb-01, llama"]


def test_the_only_gateway_that_does_not_run_is_an_outage_one_of_two_is_not():
    dead = GatewayState(error="HAProxy does not answer at its socket")
    well = gateway(server("gpu-01.llama-0", "UP"))
    one = found(observed(replica(), gateways={"lb-01": dead})).problems[0]
    two = found(observed(replica(), gateways={"lb-01": dead, "lb-02": well})).problems[0]
    assert (one.impact, two.impact) == (Impact.OUTAGE, Impact.DEGRADED)


def test_an_alert_about_what_is_named_already_is_not_named_again():
    alerts = [Alert("VllmDown", "llama-0 is down", "llama-0"), Alert("GpuHot", "hot", "gpu-02")]
    assert subjects(observed(DOWN, OTHER, alerts=alerts)) == ["llama-0", "alert GpuHot of gpu-02"]


def test_what_could_not_be_seen_is_no_good_health():
    seen = observed(
        replica(), evidence={"gpu-01": NodeEvidence("gpu-01", unread=("gpu-01: no journal",))}
    )
    assert (found(seen).unseen, found(seen).status) == (("gpu-01: no journal",), 2)


def test_journals_are_wanted_of_replicas_that_are_not_well():
    assert journals_to_read(status(DOWN, OTHER), NOW) == {"gpu-01": ("llama-0",)}


def test_a_cause_stands_before_the_worst_of_its_effects_whatever_its_own_impact():
    cause = Problem("a", "", Impact.NOTICE)
    effect = Problem("b", "", Impact.OUTAGE, because="a")
    other = Problem("c", "", Impact.DEGRADED)
    assert [each.subject for each in worst_first([other, effect, cause])] == ["a", "b", "c"]


def test_problems_that_name_each_other_as_cause_end():
    one, two = (
        Problem("a", "", Impact.RISK, because="b"),
        Problem("b", "", Impact.RISK, because="a"),
    )
    assert len(worst_first([one, two])) == 2


def test_a_stopped_server_is_to_be_started_whatever_ended_it_before():
    last = LastRestart(NOW - 600, "exit status 243")
    down = replace(DOWN, ranks=(replace(DOWN.ranks[0], stopped=True, last_restart=last),))
    seen = observed(down, OTHER, findings=[LOST], logs={"llama-0": [OUT_OF_MEMORY]})
    (said,) = (each for each in found(seen).problems if each.subject == "llama-0")
    assert "stopped by hand" in said.cause
    assert said.do == "`systemctl start vllm-llama-0` on gpu-01"
    assert said.because == ""


def test_a_certificate_that_ended_is_an_outage_and_one_that_ends_this_week_a_risk():
    def impact(seconds, use="gateway"):
        evidence = NodeEvidence("lb-01", certificates=(Certificate("/x", use, NOW + seconds),))
        return [e.impact for e in found(observed(replica(), evidence={"lb-01": evidence})).problems]

    assert impact(-60) == [Impact.OUTAGE]
    assert impact(-60, "exporter") == impact(3600) == [Impact.RISK]
    assert impact(30 * 86400) == []


def test_a_gateway_that_stopped_is_explained_by_its_own_log():
    gateways = {"lb-01": GatewayState()}
    log = replace(OUT_OF_MEMORY, cause="an error in its configuration", do="deploy it again")
    bare, told = (
        found(observed(replica(), gateways=gateways, logs=logs)).problems[0]
        for logs in ({}, {"gateway lb-01": [log]})
    )
    assert "systemctl start gpufleet-gateway" in bare.do
    assert (told.cause, told.do) == (log.cause, log.do)


def test_four_failures_at_once_are_all_named_and_each_cause_stands_before_its_effect():
    killed = replace(HUNG, line="oom-kill:task_memcg=/system.slice/vllm-qwen-0.service,task=x")
    last = LastRestart(NOW - 600, "killed by signal KILL")
    qwen = replica("qwen-0", "gpu-02", Health.STARTS, last_restart=last, gpus=("GPU-7",))
    gone = replica("phi-0", "gpu-03", Health.UNKNOWN)
    ended = NodeEvidence("lb-01", certificates=(Certificate("/x", "gateway", NOW - 60),))
    said = found(
        observed(
            DOWN,
            OTHER,
            qwen,
            gone,
            findings=[LOST],
            silent={"gpu-03": "no answer within 7 s"},
            kernels={"gpu-02": [killed]},
            evidence={"lb-01": ended},
        )
    ).problems
    order = [each.subject for each in said]
    because = {each.subject: each.because for each in said if each.because}
    assert because == {
        "llama-0": "check gpu-answers on gpu-01",
        "qwen-0": "kernel of gpu-02",
        "phi-0": "gpu-03",
    }
    assert all(order.index(cause) < order.index(effect) for effect, cause in because.items())
    assert sorted(order) == sorted([*because, *because.values(), "certificate /x on lb-01"])


# -- files of models


@each_row(
    ("model", "says", "do"),
    [
        (
            PlacedModel("/m", True, (), ("config.json",)),
            "/m: config.json: changed after the deploy",
            "`rm /m/.complete` on gpu-01, then `gpufleet deploy vllm inventories/prod.py`",
        ),
        (
            PlacedModel("/m", True, ("a.safetensors",)),
            "/m does not contain a.safetensors",
            "`rm /m/.complete",
        ),
        (PlacedModel("/m", False), "/m is not complete", "`gpufleet deploy vllm"),
    ],
)
def test_files_that_are_not_as_a_deploy_placed_them_are_named_before_what_the_log_reports(
    model, says, do
):
    log = replace(OUT_OF_MEMORY, cause="the release does not know the model")

    def first(down):
        evidence = {"gpu-01": NodeEvidence("gpu-01", models={"llama-0": model})}
        seen = observed(down, OTHER, logs={"llama-0": [log]}, evidence=evidence)
        return found(seen).problems[0]

    named = first(DOWN)
    assert says in " ".join(named.evidence)
    assert named.cause == (
        "the model's files differ from what a deploy placed: the release does not know the model"
    )
    assert named.do.startswith(do)
    stopped = replace(DOWN, ranks=(replace(DOWN.ranks[0], stopped=True),))
    assert first(stopped).do == "`systemctl start vllm-llama-0` on gpu-01"


def test_a_model_as_it_was_placed_is_not_mentioned():
    evidence = {"gpu-01": NodeEvidence("gpu-01", models={"llama-0": PlacedModel("/m", True)})}
    named = found(observed(DOWN, logs={"llama-0": [OUT_OF_MEMORY]}, evidence=evidence)).problems[0]
    assert (named.cause, named.do.splitlines()[0]) == (OUT_OF_MEMORY.cause, OUT_OF_MEMORY.do)


# -- memory


def planned(**numbers):
    return Sizing(
        **{
            **{each.name: 0 for each in fields(Sizing) if each.default is MISSING},
            "fits": True,
            "reasons": (),
            "weights_bytes_per_gpu": 12 << 30,
            "kv_bytes_for_max_model_len_per_gpu": 4915 << 20,
            "kv_cache_bytes_per_gpu": 3174 << 20,
            "max_model_len": 32768,
            "largest_max_model_len": 20000,
            **numbers,
        }
    )


def test_the_plans_numbers_stand_beside_a_log_that_reports_memory_missing():
    def evidence(size=None, rule="mem-kv-one-request", node="gpu-01"):
        log = replace(OUT_OF_MEMORY, rule=rule)
        sizes = {("llama", node): size or planned()}
        seen = observed(DOWN, OTHER, logs={"llama-0": [log]}, sizes=sizes)
        return " ".join(found(seen).problems[0].evidence)

    assert (
        "a context of 32,768 tokens needs 4.80 GiB, 3.10 GiB are available: 20,000 tokens fit"
        in (evidence())
    )
    assert "weights need 12.00 GiB" in evidence()
    assert "no context fits" in evidence(planned(largest_max_model_len=0))
    assert "as planned" not in evidence(rule="port-taken")
    assert "as planned" not in evidence(node="gpu-02")


def test_only_models_whose_log_reports_memory_missing_are_sized():
    logs = {
        "llama-0": [replace(OUT_OF_MEMORY, rule="mem-no-kv")],
        "qwen-0": [replace(OUT_OF_MEMORY, rule="len-derived")],
    }
    there = status(DOWN, replica("qwen-0", health=Health.DOWN))
    assert short_of_memory(there, logs) == {"llama"}


def test_the_rules_of_memory_exist():
    assert {each.id for each in rules()} >= RULES


def test_the_plans_numbers_are_those_of_the_division_that_it_chose():
    plan = plan_fleet(probes(), declared(), unfit_stops=False).plan
    sizes = planned_sizes(plan, {"q"})
    assert {model for model, _ in sizes} == {"q"}
    for (_, node), size in sizes.items():
        (chosen,) = (each.chosen for each in plan.candidates if node in each.names)
        assert chosen.sizing is size
        assert f"{size.max_model_len:,} tokens" in size_sentence(size)
    assert planned_sizes(plan, {"other"}) == {}
