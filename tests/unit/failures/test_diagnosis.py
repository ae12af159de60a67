"""The cause is the earliest failure that follows from no other, over all ranks and logs."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from gpufleet.failures.diagnosis import Findings, explain
from gpufleet.failures.diagnosis_text import as_json, text_lines
from gpufleet.failures.evidence import Evidence
from gpufleet.failures.log_reader import LogLine
from gpufleet.failures.rule_file import Kind, parse, rules
from gpufleet.failures.tallies import MOST_PROCESSES, OTHERS
from tests.support.checkout import ROOT
from tests.support.rows import each_row

DATA = ROOT / "tests/data"
HEALTHY = sorted((DATA / "failures/healthy").glob("*.log"))
START = "(Worker_TP0 pid=1) INFO 11-20 09:59:00 [worker.py:1] Starting"
OOM = (
    "(Worker_TP1 pid=2) ERROR 11-20 10:00:{:02} [w.py:1] torch.OutOfMemoryError: CUDA out of memory"
)
WATCHDOG = (
    "[rank0]:[E1120 10:10:00.061727749 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=78, OpType=ALLREDUCE)"
)
ENGINE_INIT = (
    "(APIServer pid=9) ERROR 11-20 10:11:00 [u.py:1] RuntimeError: Engine core initialization "
    "failed. See root cause above. Failed core proc(s): {}"
)
PORT = "(APIServer pid=9) ERROR 11-20 09:00:00 [a.py:1] OSError: [Errno 98] Address already in use"


def log(*lines: str, source: str = "a.log") -> list[LogLine]:
    return [LogLine(source, number, line) for number, line in enumerate(lines, 1)]


def causes(findings: Findings) -> list[str]:
    return [each.rule.id for each in findings.causes]


def consequences(findings: Findings) -> list[str]:
    return [each.rule.id for each in findings.consequences]


@each_row("path", HEALTHY, ids=lambda path: path.name)
def test_a_healthy_log_has_no_finding(path) -> None:
    found = explain(log(*path.read_text("utf-8").splitlines()))
    assert (causes(found), consequences(found), found.unknown) == ([], [], None)
    assert found.healthy


def test_what_is_worth_knowing_in_a_healthy_log_is_a_note() -> None:
    text = (DATA / "failures/healthy/vllm-0.32-one-gpu.log").read_text("utf-8")
    found = explain(log(*text.splitlines()))
    assert [each.rule.id for each in found.notes] == ["quality-0.8"]


def test_a_recorded_start_that_failed_names_the_library() -> None:
    text = (DATA / "journal-missing-library.txt").read_text("utf-8")
    found = explain(log(*text.splitlines()))
    assert causes(found) == ["missing-library"]
    assert consequences(found) == ["worker-failed"]


@each_row(
    ("name", "cause"),
    [
        ("arch-unknown", "sglang-arch-unknown"),
        ("colon", "sglang-name-colon"),
        ("config-suffix", "sglang-config-file"),
        ("config-underscore", "sglang-flag-unknown"),
        ("context", "sglang-context"),
        ("flag-choice", "sglang-flag-value"),
        ("flag-type", "sglang-flag-value"),
        ("flag-unknown", "sglang-flag-unknown"),
        ("folder-missing", "model-incomplete"),
        ("grpc-key", "sglang-grpc-key"),
        ("memory-small", "sglang-kv-memory"),
        ("memory-small-tp2", "sglang-kv-memory"),
        ("no-model", "sglang-no-model"),
        ("nodes-divide", "sglang-nodes-divide"),
        ("port-taken", "port-used"),
    ],
)
def test_a_recorded_failure_of_sglang_has_one_cause(name: str, cause: str) -> None:
    text = (DATA / f"failures/sglang-0.5.23/{name}.log").read_text("utf-8")
    found = explain(log(*text.splitlines()))
    assert causes(found) == [cause]
    assert set(consequences(found)) <= {"sglang-scheduler-failed", "sglang-killed-itself"}
    # Without the rule of the cause it is unknown, and the exception is given.
    others = [rule for rule in rules() if rule.id != cause]
    found = explain(log(*text.splitlines()), known=others)
    assert "killed" not in "".join(causes(found))
    if found.unknown and "Scheduler hit" in text:
        assert found.unknown.exception
        assert found.unknown.exception.text.startswith("ValueError: ")


def test_sglang_that_is_killed_by_the_kernel_is_not_said_to_have_failed_by_itself() -> None:
    died = (
        "[2026-11-29 11:18:26] RuntimeError: Rank 0 scheduler died during initialization (exit "
        "code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer."
    )
    kernel = "2026-11-29T11:18:20+00:00 gpu-01 kernel: Out of memory: Killed process 7 (sglang)"
    assert causes(explain(log(died))) == ["sglang-scheduler-killed"]
    found = explain([*log(died), *log(kernel, source="kernel")])
    assert (causes(found), consequences(found)) == (["host-oom"], ["sglang-scheduler-killed"])


def test_processes_that_sglang_kills_after_a_failure_or_a_stop_are_no_cause() -> None:
    crash = (
        "[2026-11-29 11:18:27] Subprocess scheduler_0 (pid=7) crashed with exit code -9. "
        "Triggering SIGQUIT for cleanup..."
    )
    stop = "[2026-11-29 11:18:26] SIGTERM received. signum=None frame=None. Draining requests"
    failed = "[2026-11-29 11:18:26] Received sigquit from a child process. It usually means the"
    failed += " child failed."
    assert causes(explain(log(crash))) == ["sglang-scheduler-killed"]
    assert explain(log(stop, crash)).healthy
    assert causes(explain(log(failed, crash))) == []
    begins = "[2026-11-29 12:00:00] server_args={'model_path': 'm'}"
    assert causes(explain(log(stop, begins, crash))) == ["sglang-scheduler-killed"]


def test_graphs_of_sglang_that_do_not_fit_have_the_advice_for_its_flags() -> None:
    found = explain(
        log(
            "[2026-11-29 11:18:26 TP0] Scheduler hit an exception: Traceback (most recent call l",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.00 GiB",
        )
    )
    assert causes(found) == ["sglang-graph-capture"]
    assert "mem-torch-oom" in consequences(found)


def test_the_first_failure_of_any_rank_is_the_cause_and_the_rest_followed() -> None:
    found = explain(
        [
            *log(START, WATCHDOG, source="rank0.log"),
            *log(START, OOM.format(5), source="rank1.log"),
            *log(ENGINE_INIT, source="api.log"),
        ]
    )
    assert causes(found) == ["mem-torch-oom"]
    assert found.causes[0].first.source == "rank1.log"
    assert consequences(found) == ["nccl-watchdog", "engine-init"]


def test_the_order_in_which_logs_are_read_does_not_matter() -> None:
    logs = [
        log(WATCHDOG, source="rank0.log"),
        log(OOM.format(5), OOM.format(7), source="rank1.log"),
        log(ENGINE_INIT, source="api.log"),
        log(PORT, source="old.log"),
    ]
    found = {
        (*causes(one), "|", *consequences(one))
        for order in itertools.permutations(logs)
        if (one := explain(itertools.chain(*order)))
    }
    assert found == {("port-used", "mem-torch-oom", "|", "nccl-watchdog", "engine-init")}


def test_two_failures_that_do_not_follow_from_each_other_are_both_causes_the_first_first() -> None:
    assert causes(explain(log(OOM.format(5), PORT))) == ["port-used", "mem-torch-oom"]


def test_a_hardware_error_of_the_kernel_explains_what_the_program_wrote_just_before() -> None:
    kernel = "2025-11-20T10:00:03+00:00 gpu-01 kernel: NVRM: Xid (PCI:0000:cb:00): 79, pid=1"
    program = (
        "2025-11-20T10:00:01+00:00 gpu-01 vllm[7]: CUDA error: an illegal memory access was "
        "encountered"
    )
    found = explain([*log(program, source="vllm"), *log(kernel, source="kernel")])
    assert (causes(found), consequences(found)) == (["xid-off-bus"], ["cuda-illegal"])
    assert found.causes[0].detail == "Xid 79: the GPU has fallen off the bus"
    late = kernel.replace("10:00:03", "11:00:03")
    found = explain([*log(program, source="vllm"), *log(late, source="kernel")])
    assert causes(found) == ["cuda-illegal", "xid-off-bus"]


def test_a_rank_that_only_waited_is_the_cause_if_nothing_else_failed() -> None:
    found = explain(log(WATCHDOG, ENGINE_INIT))
    assert (causes(found), consequences(found)) == (["nccl-watchdog"], ["engine-init"])


def test_of_two_that_follow_from_anything_the_earlier_one_is_the_cause() -> None:
    timeout = (
        "(APIServer pid=9) ERROR 11-20 10:20:00 [c.py:1] TimeoutError: Timed out waiting for "
        "engine core processes to start."
    )
    found = explain(log(WATCHDOG, timeout))
    assert (causes(found), consequences(found)) == (["nccl-watchdog"], ["engine-ready-timeout"])


def test_nothing_follows_from_what_came_later() -> None:
    later = OOM.format(5).replace("10:00", "11:00")
    assert causes(explain(log(WATCHDOG, later))) == ["nccl-watchdog", "mem-torch-oom"]


def test_rules_that_name_each_other_leave_the_earlier_one_as_the_cause() -> None:
    sound = {"component": "vllm", "cause": "c", "fix": "f", "source": "s"}
    known = parse(
        iter(
            [
                {"id": "a", "lines": ["a broke"], "follows": ["b"], **sound},
                {"id": "b", "lines": ["b broke"], "follows": ["*"], **sound},
            ]
        )
    )
    first, second = "2025-11-20T10:00:00Z a broke", "2025-11-20T10:00:09Z b broke"
    found = explain(log(first, second), known=known)
    assert (causes(found), consequences(found)) == (["a"], ["b"])


def test_derived_lines_alone_are_unknown_with_the_first_traceback() -> None:
    found = explain(
        log(
            "(EngineCore pid=2) ERROR 11-20 10:00:00 [core.py:1] EngineCore failed to start.",
            "(EngineCore pid=2) ERROR 11-20 10:00:00 [c.py:1] Traceback (most recent call last):",
            '(EngineCore pid=2) ERROR 11-20 10:00:00 [core.py:1]   File "x.py", line 1, in f',
            "(EngineCore pid=2) ERROR 11-20 10:00:00 [core.py:1] KeyError: 'rope_theta'",
            ENGINE_INIT,
        )
    )
    assert causes(found) == []
    assert found.unknown
    assert found.unknown.first_error
    assert found.unknown.first_error.number == 1
    assert found.unknown.exception
    assert found.unknown.exception.text == "KeyError: 'rope_theta'"
    text = "\n".join(text_lines(found))
    assert "unknown: something failed" in text
    assert "KeyError: 'rope_theta'" in text
    assert "searched: a.log (5 lines)" in text


def test_a_traceback_that_ends_in_a_derived_line_is_not_the_exception() -> None:
    found = explain(
        log(
            "Traceback (most recent call last):",
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "Traceback (most recent call last):",
            "KeyError: 'rope_theta'",
        )
    )
    assert found.unknown
    assert found.unknown.exception
    assert found.unknown.exception.number == 4


@each_row("journal", ["", "Nov 29 11:49:34 GPU01 sglang[7]: "])
@each_row("ranks", ["", " TP1", " DP0 TP1"])
def test_a_traceback_whose_first_line_alone_has_a_prefix_is_read(journal: str, ranks: str) -> None:
    """SGLang's form: the lines after the first one name no rank."""
    found = explain(
        log(
            f"{journal}[2026-11-29 11:49:34{ranks}] Scheduler hit an exception: "
            "Traceback (most recent call last):",
            f'{journal}  File "scheduler.py", line 1, in f',
            f"{journal}KeyError: 'rope_theta'",
        )
    )
    assert found.unknown
    assert found.unknown.exception
    assert found.unknown.exception.text == "KeyError: 'rope_theta'"


def test_an_error_that_no_rule_has_is_unknown_and_not_nothing() -> None:
    found = explain(log("(APIServer pid=1) ERROR 11-20 10:00:00 [a.py:1] something new"))
    assert found.unknown
    assert not found.healthy
    assert "`gpufleet doctor INVENTORY --bundle FILE` writes" in "\n".join(text_lines(found))


@each_row(
    "line",
    [
        "ValueError: something new",
        "(APIServer pid=1) ValueError: something new",
        "2025-11-20T10:00:00+00:00 gpu-01 vllm[7]: (EngineCore pid=2) my.own.FooException: new",
        "[rank1]: torch.AcceleratorError: CUDA error: something new",
    ],
)
def test_an_exception_without_level_and_traceback_is_unknown(line: str) -> None:
    found = explain(log("(APIServer pid=1) starting", line))
    assert found.unknown
    assert found.unknown.first_error
    assert found.unknown.first_error.number == 2


@each_row(
    "line",
    [
        "(APIServer pid=1) INFO 11-20 10:00:00 [a.py:1] ValueError: of a client, answered with 400",
        "(APIServer pid=1) WARNING 11-20 10:00:00 [a.py:1] ImportError: no module, not needed",
        "/opt/x.py:12: UserWarning: KeyError: 'a' is ignored",
        "DeprecationWarning: ValueError: will be raised",
        "gpu-01 kernel: ACPI Error: AE_NOT_FOUND",
        "the client wrote ValueError: x",
    ],
)
def test_an_exceptions_name_inside_a_healthy_line_is_no_failure(line: str) -> None:
    assert explain(log(line)).healthy


def test_a_wait_that_ended_is_no_finding() -> None:
    wait = (
        "(EngineCore pid=2) INFO 11-20 10:00:00 [shm.py:1] No available shared memory broadcast "
        "block found in 60 seconds."
    )
    started = "(APIServer pid=1) INFO:     Application startup complete."
    assert explain(log(wait, started)).healthy
    assert explain(log(started, wait)).unknown
    assert explain([*log(wait), *log(started, source="b.log")]).unknown


RING = (
    "(EngineCore pid=2) INFO 11-20 10:01:30 [shm.py:1] No available shared memory broadcast block "
    "found in 60 seconds."
)


def test_a_start_that_has_not_ended_is_said_to_start_or_hang_with_its_last_lines_age() -> None:
    later = "(EngineCore pid=2) INFO 11-20 10:02:00 [core.py:9] Loading weights"
    found = explain(log(BEGINS, RING, later), year=2026)
    assert found.waiting
    assert (found.waiting.last.number, found.waiting.served) == (3, False)
    text = "\n".join(text_lines(found, datetime(2026, 11, 20, 10, 5, tzinfo=UTC)))
    assert "something failed" not in text
    assert "unknown: the server is still starting or hangs; no line has an error" in text
    assert "last line: a.log:3, 2026-11-20 10:02:00Z, EngineCore, 3 min old" in text
    assert "Loading weights" in text
    value = as_json(found)
    assert value["unknown"] == {"first_error": None, "exception": None}
    assert value["waiting"]["last"]["line"] == 3


def test_a_wait_of_a_server_that_served_is_not_called_a_start() -> None:
    text = "\n".join(text_lines(explain(log(BEGINS, SERVES, RING))))
    assert "unknown: the server waits for a worker, which takes long or hangs" in text
    assert " old" not in text


def test_a_wait_beside_an_error_is_a_failure() -> None:
    error = "(Worker pid=3) ERROR 11-20 10:00:00 [w.py:1] bad"
    found = explain(log(BEGINS, RING, error))
    assert (found.waiting, bool(found.unknown)) == (None, True)
    assert explain(log(BEGINS, RING, ENGINE_INIT)).waiting is None


def test_a_clock_that_is_behind_gives_no_age() -> None:
    found = explain(log(BEGINS, RING), year=2026)
    assert " old" not in "\n".join(text_lines(found, datetime(2026, 11, 20, tzinfo=UTC)))


DEAD = (
    "(APIServer pid=9) ERROR 11-20 10:30:00 [async_llm.py:7] AsyncLLM output_handler failed.",
    "(APIServer pid=9) ERROR 11-20 10:30:00 [a.py:7] Traceback (most recent call last):",
    '(APIServer pid=9) ERROR 11-20 10:30:00 [a.py:7]   File "core_client.py", line 1, in f',
    "(APIServer pid=9) ERROR 11-20 10:30:00 [a.py:7] vllm.v1.engine.exceptions.EngineDeadError: "
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
)
BEGINS = "(APIServer pid=9) INFO 11-20 09:00:00 [api_server.py:1] vLLM API server version 0.32.0"
SERVES = "(APIServer pid=9) INFO:     Application startup complete."
STOP = "(APIServer pid=9) INFO 11-20 10:29:59 [l.py:1] [shutdown] API server: shutdown triggered"


def test_a_server_that_is_told_to_stop_has_not_failed_whatever_its_engine_client_prints() -> None:
    found = explain(log(BEGINS, SERVES, STOP, *DEAD))
    assert found.healthy
    assert [each.rule.id for each in found.notes] == ["stop-signal"]
    assert explain(log(BEGINS, SERVES, *DEAD)).unknown
    assert explain(log(BEGINS, SERVES, *DEAD, STOP)).unknown, "it stopped because it had failed"
    again = explain(log(BEGINS, SERVES, STOP, *DEAD, BEGINS, SERVES, *DEAD))
    assert again.unknown, "the next server was told nothing"


def test_an_error_before_a_stop_stays_one() -> None:
    other = "(EngineCore pid=2) ERROR 11-20 10:00:00 [a.py:1] bad"
    found = explain(log(BEGINS, SERVES, other, STOP, *DEAD))
    assert found.unknown
    assert found.unknown.first_error
    assert found.unknown.first_error.text == "bad"
    same = "(APIServer pid=9) ERROR 11-20 10:00:00 [a.py:1] bad"
    found = explain(log(BEGINS, SERVES, same, STOP, *DEAD))
    assert found.unknown
    assert found.unknown.first_error
    assert found.unknown.first_error.number == 3


def test_a_start_that_is_interrupted_has_not_failed() -> None:
    trace = "(EngineCore pid=2) Traceback (most recent call last):"
    assert explain(log(BEGINS, trace, "(EngineCore pid=2) KeyboardInterrupt", ENGINE_INIT)).healthy
    assert explain(log(BEGINS, trace, "(EngineCore pid=2) KeyError: 'a'", ENGINE_INIT)).unknown


def test_an_error_that_does_not_keep_a_server_from_starting_is_none() -> None:
    error = "(Worker pid=2) ERROR 11-20 09:10:00 [w.py:1] the tuned file is not there"
    assert explain(log(BEGINS, error)).unknown
    assert explain(log(BEGINS, error, SERVES)).healthy
    failed = explain(log(BEGINS, error, ENGINE_INIT, BEGINS, SERVES))
    assert failed.unknown, "that server did not start, the next one did"


def test_a_negative_kv_cache_is_the_cause_unless_the_server_starts() -> None:
    negative = "(Worker pid=2) INFO 11-20 10:00:00 [w.py:1] Available KV cache memory: -2.67 GiB"
    refused = "(EngineCore pid=2) ERROR 11-20 10:00:01 [c.py:1] ValueError: No available memory "
    found = explain(log(negative, refused + "for the cache blocks."))
    assert (causes(found), consequences(found)) == (["mem-kv-negative"], ["mem-no-kv"])
    assert explain(log(negative, SERVES)).healthy


def test_a_drivers_library_that_is_not_there_is_no_failure_by_itself() -> None:
    line = (
        "(APIServer pid=9) WARNING 11-20 10:00:00 [i.py:2] Failed to import from vllm._C: "
        "ImportError('{}.so.1: cannot open shared object file: No such file or directory')"
    )
    assert explain(log(line.format("libcuda"))).healthy
    assert causes(explain(log(line.format("libnuma")))) == ["missing-library"]
    assert explain(log(line.format("libnuma"), SERVES)).healthy


def test_a_rule_counts_all_lines_with_first_and_last_of_each_process() -> None:
    lines = [OOM.format(second) for second in (5, 3, 9)]
    lines[2] = lines[2].replace("Worker_TP1", "Worker_TP3")
    (found,) = explain(log(*lines), year=2025).causes
    assert (found.count, found.first.number, found.last.number) == (3, 1, 3)
    assert found.processes == (("Worker_TP1", 2), ("Worker_TP3", 1))
    assert f"{found.first_at:%F %T}" == "2025-11-20 10:00:05"


def test_processes_that_are_counted_are_bounded() -> None:
    lines = [OOM.format(1).replace("Worker_TP1", f"Worker_TP{n}") for n in range(500)]
    (found,) = explain(log(*lines)).causes
    assert found.count == 500
    assert len(found.processes) == MOST_PROCESSES + 1
    assert found.processes[0] == (OTHERS, 500 - MOST_PROCESSES)


def test_a_server_that_started_after_the_failure_is_named() -> None:
    started = "(APIServer pid=1) INFO:     Application startup complete."
    (found,) = explain(log(PORT, started)).causes
    assert found.started_after
    assert found.started_after.number == 2
    (found,) = explain(log(started, PORT)).causes
    assert found.started_after is None


def test_times_without_a_zone_are_in_the_zone_that_another_log_names() -> None:
    oom = "Nov 20 11:00:00 gpu-01 kernel: Out of memory: Killed process 4242 (VLLM::Worker)"
    program = "2025-11-20T11:00:30+0100 gpu-01 vllm[7]: OSError: [Errno 98] Address already in use"
    found = explain([*log(program, source="vllm"), *log(oom, source="kernel")])
    assert causes(found) == ["host-oom", "port-used"]
    assert f"{found.causes[0].first_at:%F %T}" == "2025-11-20 10:00:00"


def test_a_log_without_times_beside_others_is_said_not_to_be_ordered() -> None:
    kernel = "[12345.678901] NVRM: Xid (PCI:0000:cb:00): 46, pid=1"
    found = explain([*log(kernel, source="dmesg"), *log(OOM.format(1), source="vllm")])
    assert found.unordered
    assert not explain(log(kernel)).unordered


def test_without_evidence_each_possible_cause_is_named_with_where_to_look() -> None:
    line = "RuntimeError: Error 802: system not yet initialized"
    (found,) = explain(log(line)).causes
    assert len(found.causes) == len(found.looks) == 4
    assert "one of these is the cause" in "\n".join(text_lines(explain(log(line))))
    evidence = Evidence(checks={"fabric-manager": False, "fabric-units": True})
    (found,) = explain(log(line), evidence).causes
    assert [each.cause for each in found.causes] == [
        "Fabric manager does not run, or its version differs from the driver's."
    ]


def test_causes_that_evidence_excludes_are_not_named() -> None:
    evidence = Evidence(checks={"fabric-manager": True, "fabric-units": True})
    (found,) = explain(log("Error 802: system not yet initialized"), evidence).causes
    assert len(found.causes) == 2
    assert not any("Fabric manager" in each.cause for each in found.causes)


def test_a_line_without_a_time_has_that_of_the_line_before_it() -> None:
    lines = ("2025-11-20T10:00:00-0500 gpu-01 vllm[7]: starting", "NVML: API mismatch: x")
    (found,) = explain(log(*lines)).causes
    assert f"{found.first_at:%F %T}" == "2025-11-20 15:00:00"


def test_another_line_of_the_logs_is_evidence() -> None:
    kaslr = "nvidia-uvm: p.c:3176 devmem_alloc_pagemap[pid:9] request_free_mem_region() err -34"
    found = explain(log(kaslr, "Error 802: system not yet initialized"))
    advice = {each.rule.id: each.causes for each in found.causes}
    assert "KASLR" in advice["cuda-802"][0].cause


@each_row(
    ("rule_id", "line"),
    [
        ("xid-off-bus", "NVRM: Xid (PCI:0000:cb:00): 79, pid=1, \x1b[2Jgone"),
        ("disk-full", "No space left on device \u202e evil\x07"),
    ],
)
def test_nothing_that_a_terminal_obeys_is_printed(rule_id: str, line: str) -> None:
    found = explain(log(line, source="na\x1bme.log"))
    assert causes(found) == [rule_id]
    assert all(text.isprintable() for text in text_lines(found))


def test_json_has_what_the_text_has() -> None:
    value = as_json(explain(log(OOM.format(5), ENGINE_INIT), year=2025))
    assert value["schema"] == 1
    assert value["causes"][0]["rule"] == "mem-torch-oom"
    assert value["causes"][0]["first"]["line"] == 1
    assert value["causes"][0]["first"]["time"] == "2025-11-20T10:00:05+00:00"
    assert value["consequences"][0]["rule"] == "engine-init"
    assert value["read"] == {"a.log": 2}
    assert value["unknown"] is None


@given(
    st.lists(
        st.one_of(
            st.text(max_size=200),
            st.sampled_from([pattern.needle for rule in rules() for pattern in rule.patterns]),
        ).map("".join),
        max_size=8,
    )
)
def test_no_text_breaks_it(lines: Iterable[str]) -> None:
    found = explain(log(*lines))
    assert "\n".join(text_lines(found))
    assert as_json(found)


def test_there_is_a_cause_whenever_a_failure_was_found() -> None:
    """Also where rules name each other as their causes."""
    failures = [rule for rule in rules() if rule.kind is Kind.FAILURE]
    plain = [
        pattern.written
        for rule in failures
        for pattern in rule.patterns
        if pattern.expression is None
    ]
    chosen = random.Random(1)
    for _ in range(200):
        found = explain(log(*chosen.sample(plain, 4)))
        assert found.causes
        assert found.unknown is None


def test_a_context_that_does_not_fit_is_told_with_the_numbers_of_the_line() -> None:
    logs = json.loads((ROOT / "tests/data/start_up_logs.json").read_text())
    rows = logs["logs"] if isinstance(logs, dict) else logs
    lines = [line for row in rows if "KV cache is" in (line := row["lines"].get("refused", ""))]
    assert len(lines) > 10
    for line in lines:
        found = explain(log(f"ValueError: {line}")).causes[0]
        length, needs, has, *fits = re.findall(r"\d[\d.]*\d|\d", line)
        said = found.detail.replace(",", "")
        assert said.startswith(
            f"a context of {length} tokens needs {needs} GiB {has} GiB are available"
        ), line
        assert not fits or said.endswith(f": {fits[0]} tokens fit"), line
