"""The journals of a replica give the cause of its present failure, not of an earlier one."""

from __future__ import annotations

from gpufleet.checks.finding import Finding, Report, Severity
from gpufleet.doctor.journal_causes import (
    GATEWAY,
    gateway_causes,
    kernel_causes,
    last_lives,
    replica_causes,
)
from gpufleet.doctor.node_evidence import JournalLine, NodeEvidence, UnitDifference
from gpufleet.serving.rank_status import Health, RankStatus
from gpufleet.serving.status import FleetStatus, ReplicaStatus
from tests.support.rows import each_row

AT = 1_795_290_000.0
FULL = (
    "(EngineCore pid=9) ERROR 11-21 10:00:00 [core.py:1] ValueError: "
    "No available memory for the cache blocks."
)
DERIVED = "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."
DIED = "(EngineCore pid=9) ERROR 11-21 10:00:00 [m.py:1] Worker proc W0 died unexpectedly"
CONFIG = "[ALERT]    (15) : config : parsing [haproxy.cfg:1] : unknown keyword 'x'"
PORT = "OSError: [Errno 98] Address already in use"


def journal(*texts, at=AT):
    """Lines a second apart; those of systemd begin with `*`."""
    return tuple(
        JournalLine(at + n, text.removeprefix("*"), 6, text.startswith("*"))
        for n, text in enumerate(texts)
    )


def status(*nodes, health=Health.DOWN):
    ranks = tuple(RankStatus(node, n, health) for n, node in enumerate(nodes))
    return FleetStatus((ReplicaStatus("llama", 0, ranks, health, ()),), {})


def causes(stages, *, health=Health.DOWN, findings=()):
    """Return what is found in journals, by node."""
    evidence = {
        node: NodeEvidence(node, stages={"llama-0": lines}) for node, lines in stages.items()
    }
    report = Report(tuple(findings), {}, tuple(stages))
    found = replica_causes(status(*stages, health=health), evidence, report, "inventories/prod.py")
    return found.get("llama-0", ())


def test_the_root_is_named_and_not_what_follows_from_it():
    said = causes({"gpu-01": journal("*Starting vLLM", FULL, DERIVED)})
    assert len(said) == 1
    assert "No available memory" in said[0].line
    assert (said[0].where, said[0].at) == ("gpu-01", AT + 1)


def test_the_earliest_of_all_ranks_is_the_cause_whichever_node_is_read_first():
    stages = {
        "gpu-01": journal("*Starting vLLM", "x", "x", "x", DERIVED),
        "gpu-02": journal("*Starting vLLM", FULL),
    }
    said = causes(stages)
    assert [each.where for each in said] == ["rank 1 on gpu-02"]


def test_an_earlier_life_of_the_unit_is_not_the_cause_of_the_present_end():
    said = causes({"gpu-01": journal("*Starting vLLM", PORT, "*Starting vLLM", FULL)})
    assert ["No available memory" in each.line for each in said] == [True]


def test_a_unit_that_starts_anew_is_judged_by_the_life_before():
    loading = "INFO 11-21 10:00:00 [a.py:1] Loading"
    lines = journal("*Starting vLLM", FULL, "*Starting vLLM", loading)
    assert causes({"gpu-01": lines}, health=Health.STARTS)
    assert not causes({"gpu-01": lines})


@each_row(
    ("lines", "causes_found"),
    [
        (("*Starting gateway", CONFIG, "*Failed", "*Starting gateway"), 1),
        (("*Starting gateway", CONFIG, "*Failed", "*Starting gateway", "NOTICE: New worker"), 0),
        (("*Starting gateway", "NOTICE: New worker", "*Stopped"), 0),
    ],
)
def test_a_gateway_that_was_just_started_again_is_judged_by_the_start_before(lines, causes_found):
    evidence = NodeEvidence("lb-01", stages={GATEWAY: journal(*lines)})
    found = gateway_causes({"lb-01": evidence}, "inventories/prod.py")
    assert len(found["gateway lb-01"]) == causes_found


def test_a_line_of_several_causes_is_told_by_the_check_of_the_node():
    line = (
        "Free memory on device cuda:0 (1.0/80.0 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 72.0 GiB)."
    )
    foreign = Finding("foreign-memory", "gpu-01", Severity.BLOCK, "40 GiB in use")
    both = causes({"gpu-01": journal("*Starting vLLM", line)})[0]
    told = causes({"gpu-01": journal("*Starting vLLM", line)}, findings=[foreign])[0]
    assert both.cause.startswith("One of: (1) ")
    assert "Another process uses memory" in told.cause
    assert "One of" not in told.cause


@each_row(
    ("signal", "kernel", "says"),
    [
        ("SIGKILL", "", "A worker was killed"),
        ("SIGSEGV", "", "crashed in native code"),
        ("", "oom-kill:constraint=CONSTRAINT_NONE,task_memcg=/a/vllm-llama-0.service", "killed"),
        ("", "oom-kill:constraint=CONSTRAINT_NONE,task_memcg=/a/vllm-llama-1.service", ""),
        ("", "", ""),
        (None, "", ""),
    ],
)
def test_what_ended_the_process_tells_why_a_worker_died(signal, kernel, says):
    evidence = NodeEvidence(
        "gpu-01",
        stages={"llama-0": journal("*Starting vLLM", DIED)},
        units={"llama-0": UnitDifference(signal=signal)},
        kernel=journal(kernel),
    )
    found = replica_causes(status("gpu-01"), {"gpu-01": evidence}, Report((), {}, ("gpu-01",)), "i")
    (cause,) = (each.cause for each in found["llama-0"])
    assert says in cause
    assert bool(says) == bool(cause)


def test_a_replica_over_nodes_that_serves_is_not_explained():
    evidence = {n: NodeEvidence(n, stages={"llama-0": journal(FULL)}) for n in ("a", "b")}
    seen = status("a", "b", health=Health.SERVES)
    assert replica_causes(seen, evidence, Report((), {}, ("a", "b")), "i") == {}


def test_an_error_that_no_rule_has_is_shown_and_is_no_cause():
    said = causes(
        {
            "gpu-01": journal(
                "*Starting vLLM",
                "Traceback (most recent call last):",
                '  File "x.py", line 1',
                "KeyError: 'strange'",
            )
        }
    )
    assert [(each.cause, each.line) for each in said] == [("", "KeyError: 'strange'")]


def test_the_kernel_is_asked_for_its_host_and_not_for_what_checks_judge():
    lines = journal(
        "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.",
        "EXT4-fs (sda1): Remounting filesystem read-only",
    )
    said = kernel_causes(NodeEvidence("gpu-01", kernel=lines), "inventories/prod.py")
    assert ["read-only" in each.line for each in said] == [True]


def test_commands_have_the_inventory_and_the_replica_in_them():
    said = causes({"gpu-01": journal("*Starting vLLM", FULL)})[0]
    assert "INVENTORY" not in said.do
    assert "REPLICA" not in said.do


def test_a_journal_that_begins_within_a_life_is_read_whole():
    lines = journal("one", "two")
    assert last_lives(lines, 1) == lines
