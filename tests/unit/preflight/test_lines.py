"""Each line of a preflight is OK on a sound fleet, and one planted fault turns it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gpufleet.checks.evaluate import evaluate
from gpufleet.errors import FleetError
from gpufleet.fleet.drift import drift_from_probes
from gpufleet.fleet.inventory_check import Validation
from gpufleet.load_test.level_runs import Contract
from gpufleet.load_test.result import StoredMeasurements
from gpufleet.node.topology import node_from_probe
from gpufleet.planning import planner
from gpufleet.preflight import (
    gateway_lines,
    line,
    network_lines,
    node_lines,
    objective_lines,
    plan_lines,
    rehearsal_lines,
    storage_lines,
    tls_lines,
)
from gpufleet.preflight.gateway_lines import GatewayAnswer
from gpufleet.preflight.line import CHECKS, Line, Preflight, Status, Verdict, order_lines
from gpufleet.preflight.network_lines import ClockReading, KnownNode, clock_reading
from gpufleet.preflight.rehearsal_lines import GitState
from gpufleet.preflight.storage_lines import WantedModel
from gpufleet.preflight.tls_lines import TlsServer
from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.sizing.architectures.description import HubSilence
from gpufleet.sizing.checkpoint_reader import Hub, HubSilentError, read
from gpufleet.upgrade.run.journal_entry import Entry
from tests.unit.load_test.sample_results import measurement
from tests.unit.preflight import sound_fleet as fleet
from tests.unit.preflight.sound_fleet import FRONT, GPU_NODES, INVENTORY, NOW

OK, WARN, FAIL, UNKNOWN = Status.OK, Status.WARN, Status.FAIL, Status.UNKNOWN
ONE, TWO = GPU_NODES


def statuses(lines: Iterable[Line]) -> dict[str, Status]:
    return {each.subject: each.status for each in lines}


def the(lines: Iterable[Line], subject: str) -> Verdict:
    found = {each.subject: each.verdict for each in lines}
    assert subject in found, found
    return found[subject]


# -- settings, plan, capacity


def test_mistakes_of_settings_fail_and_notes_warn():
    def lines(**found: Any) -> list[Line]:
        return [*plan_lines.settings_lines(Validation(**found), INVENTORY, 3)]

    assert [each.status for each in lines()] == [OK]
    assert [e.status for e in lines(problems=("a.yml:3: wrong",))] == [FAIL]
    assert [e.status for e in lines(remarks=("a file is not read",))] == [WARN]


def planned(stages: Any, why_unknown: str = "") -> list[Line]:
    settings = dict.fromkeys(GPU_NODES, fleet.gpu_settings())
    return [*plan_lines.plan_lines(stages, settings, why_unknown, INVENTORY)]


def by_check(lines: Iterable[Line]) -> dict[str, Status]:
    return {each.check: each.status for each in lines}


def test_a_plan_with_a_replica_on_each_node_survives_the_loss_of_one():
    assert by_check(planned(fleet.stages(ONE, TWO))) == {"plan": OK, "one-lost-node": OK}


def test_two_replicas_on_one_node_are_lost_with_it_and_the_line_names_it():
    lines = planned(fleet.stages(ONE, ONE))
    assert by_check(lines) == {"plan": OK, "one-lost-node": WARN}
    assert "gpu-01" in lines[-1].verdict.what


def test_a_model_with_too_few_replicas_and_a_plan_that_is_refused_fail():
    assert by_check(planned(fleet.stages(ONE)))["plan"] is FAIL
    assert by_check(planned(("qwen does not fit",))) == {"plan": FAIL, "one-lost-node": UNKNOWN}


def test_without_an_answer_of_every_node_the_plan_is_unknown():
    lines = planned((), f"{ONE}: no answer")
    assert by_check(lines) == {"plan": UNKNOWN, "one-lost-node": UNKNOWN}
    assert ONE in lines[0].verdict.proof


def capacity(loads: Any, *nodes: str) -> list[Line]:
    rules = Upgrade()
    return [*plan_lines.spare_capacity_lines(fleet.running(*nodes), loads, rules, INVENTORY)]


def test_an_upgrade_is_possible_while_the_others_carry_the_load():
    sound = (fleet.load("qwen-0", ONE), fleet.load("qwen-1", TWO))
    assert statuses(capacity(sound, ONE, TWO)) == {"qwen": OK}
    full = (fleet.load("qwen-0", ONE, 60), fleet.load("qwen-1", TWO, 60))
    assert statuses(capacity(full, ONE, TWO)) == {"qwen": WARN}
    assert statuses(capacity(sound[:1], ONE)) == {"qwen": WARN}, "a single replica"


def test_replicas_that_are_full_and_a_number_to_keep_that_is_never_there_fail():
    full = (fleet.load("qwen-0", ONE, 64), fleet.load("qwen-1", TWO, 70))
    assert statuses(capacity(full, ONE, TWO)) == {"qwen": FAIL}
    sound = (fleet.load("qwen-0", ONE), fleet.load("qwen-1", TWO))
    for keep, status in ((1, OK), (2, WARN), (3, FAIL)):
        lines = plan_lines.spare_capacity_lines(
            fleet.running(ONE, TWO), sound, Upgrade(keep=keep), INVENTORY
        )
        assert statuses(lines) == {"qwen": status}, keep


def test_a_model_that_falls_below_the_number_to_keep_when_a_node_is_lost_fails():
    settings = dict.fromkeys(GPU_NODES, fleet.gpu_settings())

    def lost(keep: int, *nodes: str) -> Status:
        found = plan_lines.plan_lines(fleet.stages(*nodes), settings, "", INVENTORY, keep)
        return by_check(found)["one-lost-node"]

    assert lost(1, ONE, TWO) is OK
    assert lost(2, ONE, TWO) is FAIL
    assert lost(2, ONE, TWO, "gpu-03") is OK
    assert lost(1, ONE) is WARN


def test_a_plan_is_unknown_where_only_the_hub_could_tell_the_size_of_a_model():
    with pytest.raises(HubSilentError) as unread:
        read("org/model", hub=Hub(endpoint="http://127.0.0.1:9", cache="/nonexistent"), seconds=30)
    described = HubSilence("; ".join(unread.value.problems))
    nodes = [node_from_probe(name, fleet.probe(name)) for name in GPU_NODES]
    settings = dict.fromkeys(GPU_NODES, fleet.gpu_settings())

    def problems(description: str) -> tuple[str, ...]:
        with pytest.raises(FleetError) as refused:
            planner.plan(nodes, settings, {"qwen": description}, ())
        return refused.value.problems

    found = planned(problems(described))
    assert by_check(found) == {"plan": UNKNOWN, "one-lost-node": UNKNOWN}
    assert "`serving.qwen.tensor_parallel`" in found[0].verdict.remedy
    missing = problems("org/model: not found at https://hub.example")
    assert by_check(planned(missing))["plan"] is FAIL, "a wrong name is a mistake"
    alike = problems(str(described))
    assert by_check(planned(alike))["plan"] is FAIL, "the kind of problem decides, not its words"


def test_a_load_that_is_unknown_is_no_spare_capacity():
    silent = fleet.load("qwen-0", ONE, running=None, unknown="the server returned no metrics")
    found = capacity((silent, fleet.load("qwen-1", TWO)), ONE, TWO)
    assert statuses(found) == {"qwen": UNKNOWN}
    assert statuses(capacity("a node is silent", ONE)) == {"fleet": UNKNOWN}
    assert statuses(capacity(())) == {"fleet": UNKNOWN}


# -- nodes


def drivers(settings: Any, **probes: Any) -> dict[str, Status]:
    answers = {node: fleet.probe(node) for node in GPU_NODES}
    answers |= {name.replace("_", "-"): each for name, each in probes.items()}
    of_nodes = dict.fromkeys(GPU_NODES, settings)
    moved = drift_from_probes(answers, of_nodes, NOW.date())
    return statuses(node_lines.driver_lines(answers, moved, of_nodes, INVENTORY))


def test_a_driver_that_is_not_the_locks_fails():
    assert drivers(fleet.gpu_settings()) == {"gpu-[01-02]": OK}
    other = fleet.gpu_settings(gpu_lock={"driver": "580.105.08"})
    assert drivers(other) == {"gpu-[01-02]": FAIL}


def test_a_driver_without_a_lock_warns_and_a_silent_node_is_unknown():
    assert drivers(fleet.gpu_settings(gpu_lock=None)) == {"gpu-[01-02]": WARN}
    found = drivers(fleet.gpu_settings(), gpu_02="cannot be reached")
    assert found == {ONE: OK, TWO: UNKNOWN}


def releases(release: str, *nodes: str) -> dict[str, Status]:
    wanted = dict.fromkeys(GPU_NODES, release)
    return statuses(node_lines.release_lines(fleet.running(*nodes), wanted, INVENTORY))


def test_a_replica_of_another_release_fails_and_a_node_without_one_is_unknown():
    assert releases(fleet.RELEASE, ONE, TWO) == {"gpu-[01-02]": OK}
    assert releases("0.33.0-abcdefabcd", ONE, TWO) == {"gpu-[01-02]": FAIL}
    assert releases(fleet.RELEASE, ONE) == {ONE: OK, TWO: UNKNOWN}


def checked(change: Any, **settings: Any) -> dict[str, Status]:
    answers: dict[str, Any] = {node: fleet.probe(node) for node in GPU_NODES}
    change(answers)
    of_nodes = dict.fromkeys(GPU_NODES, fleet.gpu_settings(**settings))
    report = evaluate(answers, of_nodes, dt.date(2026, 1, 1))
    return statuses(node_lines.check_lines(report, answers, INVENTORY))


def test_a_node_whose_check_blocks_fails_and_so_does_a_silent_one():
    def mix_versions(answers: dict[str, Any]) -> None:
        answers[ONE]["driver"]["library"]["version"] = "570.86.10"

    assert checked(lambda _: None) == {"gpu-[01-02]": OK}
    assert checked(mix_versions)[ONE] is WARN
    assert checked(lambda _: None, gpus={"count": 9}) == {"gpu-[01-02]": FAIL}
    assert checked(lambda answers: answers.update({TWO: "no answer"}))[TWO] is FAIL


# -- storage

WANTED = WantedModel("qwen", fleet.MODEL_DIRECTORY, True, {"config.json": ("git", "0" * 40)})


def models(wanted: WantedModel = WANTED, **said: Any) -> Verdict:
    looks = fleet.looks(gpu_01=fleet.look(ONE, models={fleet.MODEL_DIRECTORY: fleet.model(**said)}))
    (found,) = storage_lines.model_lines(looks, {ONE: (wanted,)}, INVENTORY)
    assert found.subject == f"qwen on {ONE}"
    return found.verdict


def test_a_model_without_a_file_or_with_another_one_fails():
    assert models().status is OK
    for fault in ("missing", "wrong", "changed", "extra"):
        found = models(**{fault: ["config.json"]})
        assert found.status is FAIL, fault
        assert "config.json" in found.proof
    assert models(complete=False).status is FAIL


def test_a_model_without_a_lock_warns_and_one_that_is_not_there_fails():
    unlocked = WantedModel("qwen", fleet.MODEL_DIRECTORY, True, None)
    assert models(unlocked).status is WARN
    gone = fleet.look(ONE, models={fleet.MODEL_DIRECTORY: {"missing": "absent"}})
    slow = fleet.look(ONE, models={fleet.MODEL_DIRECTORY: {"missing": "timeout"}})
    for said, status in ((gone, FAIL), (slow, UNKNOWN), ("no answer", UNKNOWN)):
        (found,) = storage_lines.model_lines({ONE: said}, {ONE: (WANTED,)}, INVENTORY)
        assert found.status is status


def disk(**changed: Any) -> Status:
    answers = {ONE: fleet.probe(ONE) | changed}
    found = storage_lines.disk_lines(
        answers, fleet.looks(), {ONE: (WANTED,)}, {ONE: fleet.RELEASES}, INVENTORY
    )
    return found[0].status


def test_release_and_model_on_one_disk_need_room_together():
    assert disk() is OK
    system = fleet.probe(ONE)["system"]
    # 9 + 61 GiB are needed, each alone would find room.
    little = {**next(iter(system["disks"].values())), "free_mib": 65 << 10}
    assert disk(system={**system, "disks": dict.fromkeys(system["disks"], little)}) is WARN
    assert disk(system={**system, "disks": {}}) is UNKNOWN


def test_a_disk_without_room_for_another_release_fails():
    system = fleet.probe(ONE)["system"]
    full = {**next(iter(system["disks"].values())), "free_mib": 8 << 10}
    assert disk(system={**system, "disks": dict.fromkeys(system["disks"], full)}) is FAIL


# -- network


def names(change: Any = None, address: str = "10.0.0.1") -> Verdict:
    known = {
        ONE: KnownNode(address, frozenset({"10.0.0.1"})),
        TWO: KnownNode("10.0.0.2", frozenset({"10.0.0.2"})),
    }
    looks = {TWO: fleet.look(TWO, names=change or {})}
    (found,) = network_lines.name_lines(looks, known, {TWO: ("hub.example",)})
    return found.verdict


def test_a_name_that_does_not_resolve_fails_where_programs_use_it():
    assert names().status is OK, "nodes' names are not used: their addresses are numbers"
    assert names({"hub.example": fleet.ABSENT}).status is FAIL
    assert names({"hub.example": {"missing": "timeout"}}).status is UNKNOWN
    assert names({"gpu-01.example": fleet.ABSENT}, "gpu-01.example").status is FAIL


def test_a_name_that_leads_to_another_machine_is_found():
    assert names({ONE: ["10.0.0.1"]}).status is OK
    other = names({ONE: ["203.0.113.9"]})
    assert other.status is WARN
    assert "gpu-01 resolves to 203.0.113.9" in other.proof
    assert names({ONE: ["10.0.0.1", "203.0.113.9"]}).status is WARN, "one of two is enough"
    used = {"gpu-01.example": ["203.0.113.9"]}
    assert names(used, "gpu-01.example").status is FAIL
    assert names({TWO: ["127.0.1.1"]}).status is OK, "a node's own name may be loopback there"


def clocks(**readings: tuple[float, float]) -> dict[str, Status]:
    found = {name: ClockReading(*each) for name, each in readings.items()}
    return statuses(network_lines.clock_lines(found))


def test_a_clock_is_off_only_where_the_round_trip_cannot_explain_it():
    assert clocks(a=(-0.2, 0.3), b=(-0.1, 0.1)) == {"a b": OK}
    assert clocks(a=(-0.2, 0.3), b=(3.0, 3.5)) == {"a": OK, "b": FAIL, "b and a": FAIL}
    assert clocks(a=(-0.2, 4.0)) == {"a": UNKNOWN}
    assert clocks(a=(5.0, 5.2), b=(5.1, 5.3)) == {"a": WARN, "b": WARN}, "this machine's is wrong"


def test_the_programs_own_time_on_the_node_is_not_counted_as_a_difference():
    found = clock_reading(sent=100.0, answered=110.2, began=100.1, ended=110.1)
    assert (found.low, found.high) == (110.1 - 110.2, 100.1 - 100.0)


def test_a_clock_is_told_as_the_middle_of_its_bounds_and_how_far_they_are():
    assert str(ClockReading(0.2, 0.4)) == "+0.300 s (within 0.100 s)"


def sources(page: Any, *, incomplete: bool = False, wanted: bool = True) -> Status:
    looks = {ONE: fleet.look(ONE, pages={"source model qwen": page})}
    urls = {ONE: {"source model qwen": "https://hub.example/api"}} if wanted else {}
    found = network_lines.source_lines(looks, urls, {ONE: incomplete}, INVENTORY)
    return found[0].status


def test_a_hub_that_is_not_reached_fails_only_where_it_is_needed_now():
    assert sources({"status": 401}) is OK
    assert sources({"error": "no route"}) is WARN
    assert sources({"error": "no route"}, incomplete=True) is FAIL
    assert sources({"status": 404}) is WARN
    assert sources({"missing": "timeout"}) is WARN
    assert sources({}, wanted=False) is OK


# -- certificates


def tls(now: dt.datetime = NOW, **shown: Any) -> Status:
    server = TlsServer(FRONT, FRONT, "gateway.port", "10.0.0.3", 8443, "PEM", "ca.pem", False)
    said = {"verified": True, "why": "", "certificate": fleet.certificate(), **shown}
    looks = fleet.looks(front=fleet.look(FRONT, tls={server.id: said}))
    found = tls_lines.tls_lines(looks, (server,), fleet.fleet_settings(), now)
    return found[0].status


def test_a_certificate_that_is_not_believed_or_ends_soon_is_found():
    assert tls() is OK
    assert tls(verified=False, why="self-signed certificate") is FAIL
    assert tls(verified=False, why="connection refused", certificate="") is FAIL
    assert tls(certificate=fleet.certificate(20)) is WARN
    assert tls(certificate=fleet.certificate(-1)) is FAIL
    assert tls(certificate="bm8=") is UNKNOWN


def test_a_gateway_without_tls_warns():
    gateway = {"allow_plain_http": True, "allow_unauthenticated": True}
    settings = {FRONT: fleet.front_settings(gateway=gateway)}
    (found,) = tls_lines.tls_lines(fleet.looks(), (), settings, NOW)
    assert (found.status, found.subject) == (WARN, FRONT)


# -- gateway


def refusal(answer: GatewayAnswer) -> Status:
    found = gateway_lines.refusal_lines({FRONT: answer}, fleet.fleet_settings())
    return next(iter(found)).status


def test_a_gateway_that_answers_without_a_key_fails():
    assert refusal(GatewayAnswer(401)) is OK
    assert refusal(GatewayAnswer(200)) is FAIL
    assert refusal(GatewayAnswer(503)) is FAIL
    assert refusal(GatewayAnswer(None, "refused")) is UNKNOWN


def key(answer: GatewayAnswer | None, given: str | None = fleet.KEY) -> Line:
    answers = None if answer is None else {FRONT: answer}
    lines = gateway_lines.key_lines(answers, given, fleet.fleet_settings(), INVENTORY)
    return next(iter(lines))


def test_a_key_is_proven_by_a_request_and_never_shown():
    good = key(GatewayAnswer(200, models=("qwen",)))
    assert good.status is OK
    assert "client app" in good.verdict.proof
    bad = key(GatewayAnswer(401), "another key")
    assert bad.status is FAIL
    assert key(GatewayAnswer(200)).status is WARN, "it may use no model"
    unasked = key(None, None)
    assert unasked.status is UNKNOWN
    assert "--key-file" in unasked.verdict.remedy
    assert not [e for e in (good, bad) if fleet.KEY in str(e) or "another key" in str(e)]


def test_limits_that_are_not_declared_warn():
    def limits(**gateway: Any) -> Status:
        settings = fleet.front_settings()
        assert settings.gateway is not None
        changed = settings.gateway.model_copy(update=gateway)
        here = {FRONT: settings.model_copy(update={"gateway": changed})}
        return next(iter(gateway_lines.limit_lines(here))).status

    assert limits() is OK
    assert limits(per_server=None) is WARN
    client = fleet.front_settings().gateway.clients[0]  # type: ignore[union-attr]
    free = client.model_copy(update={"requests_per_minute": None})
    assert limits(clients=(free,)) is WARN


def test_a_gateway_that_any_machine_may_fill_fails():
    def limits(firewall: Any, **gateway: Any) -> Status:
        free = {"allow_plain_http": True, "allow_unauthenticated": True, **gateway}
        settings = fleet.front_settings(gateway=free, firewall=firewall)
        return next(iter(gateway_lines.limit_lines({FRONT: settings}))).status

    assert limits(None) is FAIL
    assert limits({}) is WARN
    assert limits(None, listen="127.0.0.1") is WARN
    assert limits(None, per_server=64) is OK


def test_a_fleet_without_a_gateway_has_each_of_its_lines():
    alone = {ONE: fleet.gpu_settings()}
    commands = ("x", "{node}")
    balanced = fleet.gpu_settings(balancer={"drain_command": commands, "undrain_command": commands})
    for check, lines in (
        ("refusal", lambda of: gateway_lines.refusal_lines({}, of)),
        ("key", lambda of: gateway_lines.key_lines(None, None, of, INVENTORY)),
        ("limits", gateway_lines.limit_lines),
    ):
        assert by_check(lines(alone)) == {check: WARN}
        assert by_check(lines({ONE: balanced})) == {check: UNKNOWN}


# -- objectives


def test_a_model_without_an_objective_for_a_latency_warns():
    served = fleet.gpu_settings().serving
    assert statuses(objective_lines.objective_lines(served, INVENTORY)) == {"qwen": OK}
    bare = {"qwen": served["qwen"].model_copy(update={"objectives": type(
        served["qwen"].objectives)()})}  # fmt: skip
    assert statuses(objective_lines.objective_lines(bare, INVENTORY)) == {"qwen": WARN}


def measured(
    days: float = 1, *, changed: bool = False, kept: bool = True, missed: bool = False
) -> Status:
    from dataclasses import replace

    from gpufleet.load_test.subjects import subject_of
    from gpufleet.planning.stage import Running

    model = fleet.gpu_settings().serving["qwen"]
    runs = fleet.running(ONE)
    subject = subject_of(runs, model, {}, runs)
    found = measurement(
        model="qwen",
        contract=Contract(ttft_seconds=0.5, share=0.95),
        subject=subject,
        when=NOW - dt.timedelta(days=days),
    )
    if not kept:
        found = replace(found, loop="closed")
    if missed:
        found = replace(found, found=replace(found.found, kept=None, missed=0.5, why="slow"))
    now_runs: tuple[Running, ...] = runs
    if changed:
        now_runs = tuple(replace(each, release="0.33.0-ab") for each in runs)
    lines = objective_lines.measured_lines(
        {"qwen": model},
        now_runs,
        {},
        stored=StoredMeasurements((found,), ()),
        now=NOW,
        inventory=INVENTORY,
    )
    return next(iter(lines)).status


def test_a_measurement_counts_while_it_is_of_what_runs_and_not_old():
    assert measured() is OK
    assert measured(objective_lines.OLD_DAYS + 1) is WARN
    assert measured(changed=True) is WARN
    assert measured(kept=False) is WARN
    assert measured(missed=True) is FAIL, "at the lowest rate users wait longer than promised"


# -- rehearsals and backup


def journal(*entries: tuple[str, str | None, dict[str, Any]], kind: str = "upgrade") -> Any:
    at = NOW.timestamp() - 86400
    said = {
        "id": "20261127T120000Z-ab12",
        "kind": kind,
        "inventory": str(Path(INVENTORY).resolve()),
    }
    first = Entry(at, "started", said=said)
    return (first, *(Entry(at, what, group=group, said=more) for what, group, more in entries))


def rehearsed(*journals: Any, drained: tuple[str, ...] = ()) -> dict[str, Status]:
    lines = rehearsal_lines.rehearsal_lines(journals, (), drained, Path(INVENTORY), NOW)
    return statuses(lines)


def test_a_drain_and_a_rollback_count_when_a_journal_of_this_inventory_has_them():
    drain, end = ("drained", "qwen-0", {"left": 0}), ("finished", None, {})
    assert rehearsed() == {"drain": WARN, "rollback": WARN}
    assert rehearsed(journal(drain, end)) == {"drain": OK, "rollback": WARN}
    back = journal(drain, end, kind="rollback")
    assert rehearsed(back) == {"drain": OK, "rollback": OK}
    returned = journal(drain, ("returned", "qwen-0", {}), end)
    assert rehearsed(returned) == {"drain": OK, "rollback": OK}
    assert rehearsed(drained=("qwen-0",)) == {"drain": OK, "rollback": WARN}
    first, *rest = back
    other = Entry(first.at, "started", said={**first.said, "inventory": "/elsewhere.py"})
    assert rehearsed((other, *rest)) == {"drain": WARN, "rollback": WARN}


def test_an_upgrade_that_has_not_ended_or_left_a_replica_out_of_service_fails():
    drain, end = ("drained", "qwen-0", {"left": 0}), ("finished", None, {})
    assert rehearsed(journal(drain))["last upgrade"] is FAIL
    sound = journal(drain, end)
    assert "last upgrade" not in rehearsed(sound)
    earlier = tuple(Entry(each.at - 86400, each.what, said=each.said) for each in journal(drain))
    assert "last upgrade" not in rehearsed(earlier, sound), "a later one ended well"
    wave = {"number": 1, "groups": [{"id": "qwen-0", "kind": "stages", "nodes": [ONE],
                                     "replicas": ["qwen-0"]}]}  # fmt: skip
    planned = ("planned", None, {"waves": [wave]})
    stuck = ("stuck", "qwen-0", {"why": ["its old release is gone"]})
    found = rehearsal_lines.rehearsal_lines(
        [journal(planned, drain, stuck, end, kind="rollback")], (), (), Path(INVENTORY), NOW
    )
    verdict = the(found, "last rollback")
    assert verdict.status is FAIL
    assert "qwen-0" in verdict.what
    assert "its old release is gone" in verdict.proof


def test_secrets_that_git_keeps_fail():
    sound = GitState("ab12cd3 of 2026-11-27", (), ("origin",), 0, secrets=("secrets/key",))
    found = rehearsal_lines.backup_line(sound, "fleet")
    assert found.status is FAIL
    assert "secrets/key" in found.verdict.remedy


def test_settings_are_safe_when_they_are_committed_and_on_a_remote():
    sound = GitState("ab12cd3 of 2026-11-27", (), ("origin",), 0)
    assert rehearsal_lines.backup_line(sound, "fleet").status is OK
    for bad in (
        GitState(problem="not a git repository"),
        GitState(),
        GitState(sound.commit, ("group_vars/all.yml",), ("origin",), 0),
        GitState(sound.commit, (), (), None),
        GitState(sound.commit, (), ("origin",), 2),
    ):
        found = rehearsal_lines.backup_line(bad, "fleet")
        assert found.status is WARN, bad
        assert found.verdict.remedy


# -- all of them


def test_the_exit_status_is_that_of_the_worst_line():
    def status(*of: Status) -> int:
        lines = tuple(Line("plan", "x", Verdict(each, "", "")) for each in of)
        return Preflight(INVENTORY, NOW, "0.2.0", lines).exit_status

    assert status(OK, WARN) == 0
    assert status(OK, UNKNOWN, WARN) == 2
    assert status(OK, FAIL, UNKNOWN) == 1


def test_no_check_is_left_out_in_silence():
    found = order_lines([line.unknown("plan", "why", "type this")])
    assert [each.check for each in found] == list(CHECKS)
    assert {each.status for each in found} == {UNKNOWN}
