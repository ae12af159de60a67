"""Prefixes of several programs and releases: what is left is the message, with time and process."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gpufleet.failures.log_prefix import split_prefix
from gpufleet.failures.log_reader import LogLine
from gpufleet.failures.rule_file import rules
from gpufleet.failures.tallies import count_lines
from gpufleet.serving.logs import Line
from tests.support.rows import each_row
from tests.unit.failures.test_rule_file import LINES

VLLM = "(EngineCore_DP0 pid=123) ERROR 11-20 10:00:00 [core.py:700] "
FORMS = {
    "vLLM 0.32": ("(EngineCore pid=12) ERROR 11-20 10:00:00 [core.py:93] ", "11-20 10:00:00"),
    "vLLM debug": ("(Worker_TP1 pid=5) ERROR 11-20 10:00:00 [v1/a/b.py:597] ", "11-20 10:00:00"),
    "vLLM 0.9": ("(VllmWorker rank=1 pid=5) ERROR 05-27 11:47:57 [c.py:3] ", "05-27 11:47:57"),
    "vLLM 0.10": ("(VllmWorker TP1 pid=5) ERROR 08-27 11:47:57 [c.py:3] ", "08-27 11:47:57"),
    "vLLM 0.11": (VLLM, "11-20 10:00:00"),
    "vLLM 0.4": ("(RayWorkerWrapper pid=79) INFO 05-25 00:00:25 utils.py:43] ", "05-25 00:00:25"),
    "Ray": (
        "(RayWorkerWrapper pid=3, ip=10.0.0.2) ERROR 05-25 00:00:25 w.py:1] ",
        "05-25 00:00:25",
    ),
    "Ray, repeated": (
        "(RayWorkerWrapper pid=3, ip=10.0.0.2) [repeated 3x across cluster] ",
        None,
    ),
    "Ray, coloured": ("\x1b[36m(RayWorkerWrapper pid=3)\x1b[0m ", None),
    "SGLang": ("[2026-11-29 11:18:26] ", "11-29 11:18:26"),
    "SGLang, SGLANG_LOG_MS": ("[2026-11-29 11:18:26.123 TP0] ", "11-29 11:18:26"),
    "SGLang, all ranks": (
        "[2026-11-29 11:49:34 DP0 PP1 ATTN_CP0 MOE_DP0 TP1 EP12] ",
        "11-29 11:49:34",
    ),
    "short of SGLang": (
        "Nov 20 10:00:00 g sglang[7]: [2026-11-20 10:00:00 TP0] ",
        "11-20 10:00:00",
    ),
    "short-iso": ("2025-11-20T10:00:00+0100 gpu-01 vllm[77]: ", "11-20 10:00:00"),
    "short-iso of the kernel": ("2025-11-20T10:00:00+0100 gpu-01 kernel: ", "11-20 10:00:00"),
    "short": ("Nov 20 10:00:00 gpu-01 vllm-serve.sh[77]: ", "11-20 10:00:00"),
    "short-precise": ("Nov 20 10:00:00.123456 gpu-01 vllm[77]: ", "11-20 10:00:00"),
    "short-full": ("Thu 2025-11-20 10:00:00 UTC gpu-01 vllm[77]: ", "11-20 10:00:00"),
    "short-full, another zone": ("Thu 2025-11-20 10:00:00 CET gpu-01 v[7]: ", "11-20 10:00:00"),
    "short of vLLM": (f"Nov 20 10:00:00 gpu-01 vllm[77]: {VLLM}", "11-20 10:00:00"),
    "docker logs -t": ("2025-11-20T10:00:00.123456789Z ", "11-20 10:00:00"),
    "docker logs -t of vLLM": (f"2025-11-20T10:00:00.123456789Z {VLLM}", "11-20 10:00:00"),
    "CRI": ("2025-11-20T10:00:00.123456789+00:00 stderr F ", "11-20 10:00:00"),
    "docker compose": ("vllm-1  | ", None),
    "kubectl --prefix --timestamps": (
        f"[pod/vllm-0/server] 2025-11-20T10:00:00.123456789Z {VLLM}",
        "11-20 10:00:00",
    ),
    "dmesg": ("[12345.678901] ", None),
    "dmesg -T": ("[Thu Nov 20 10:00:00 2025] ", "11-20 10:00:00"),
    "dmesg -x": ("kern  :err   : [    1.100000] ", None),
    "dmesg --time-format iso": ("2025-11-20T10:00:00,502716+00:00 ", "11-20 10:00:00"),
    "fabric manager": ("[Nov 20 2025 10:00:00] [ERROR] [tid 77] ", "11-20 10:00:00"),
    "PyTorch": (
        "[rank1]:[E1120 10:00:00.061727749 ProcessGroupNCCL.cpp:683] ",
        "11-20 10:00:00",
    ),
    "PyTorch, one month digit": ("[rank1]:[E810 03:04:11.06 P.cpp:1] ", "08-10 03:04:11"),
    "PyTorch of Python": ("E1121 12:34:04.751000 1213 torch/a/b.py:53] ", "11-21 12:34:04"),
    "a traceback of PyTorch": ("[rank0]: ", None),
}
JSON_FORMS = {
    "Docker's json-file": lambda text: {"log": f"{text}\n", "stream": "stderr", "time": TIME},
    "gpufleet logs": lambda text: Line(1763632800000000, "gpu-01", 0, 1, 77, 6, text).as_json(),
    "the journal's export": lambda text: {
        "MESSAGE": text,
        "__REALTIME_TIMESTAMP": "1763632800000000",
        "_HOSTNAME": "gpu-01",
        "_TRANSPORT": "stdout",
        "PRIORITY": "6",
    },
    "the journal's export of bytes": lambda text: {
        "MESSAGE": [*text.encode()],
        "__REALTIME_TIMESTAMP": "1763632800000000",
    },
}
TIME = "2025-11-20T10:00:00.123456789Z"


@each_row(("prefix", "time"), FORMS.values(), ids=FORMS)
def test_a_prefix_is_taken_off_with_its_time(prefix: str, time: str | None) -> None:
    found = split_prefix(f"{prefix}RuntimeError: it broke")
    assert found.text == "RuntimeError: it broke"
    assert (found.stamp and f"{found.stamp.moment:%m-%d %H:%M:%S}") == time


@each_row("form", JSON_FORMS.values(), ids=JSON_FORMS)
def test_json_of_the_journal_and_of_docker_is_read(form) -> None:
    found = split_prefix(json.dumps(form(f'{VLLM}RuntimeError: "it" broke')))
    assert found.text == 'RuntimeError: "it" broke'
    assert found.stamp
    assert found.stamp.offset == 0
    assert f"{found.stamp.moment:%F %T}" == "2025-11-20 10:00:00"
    assert found.process.endswith("EngineCore_DP0")


@each_row(
    ("line", "process"),
    [
        ("(EngineCore_DP0 pid=123) x", "EngineCore_DP0"),
        ("(RayWorkerWrapper pid=3, ip=10.0.0.2) x", "RayWorkerWrapper@10.0.0.2"),
        ("[rank7]: x", "rank7"),
        ("[pod/vllm-0/server] (Worker_TP1 pid=5) x", "pod/vllm-0/server/Worker_TP1"),
        ("2025-11-20T10:00:00+0100 gpu-01 vllm[7]: (Worker_TP1 pid=5) x", "gpu-01/Worker_TP1"),
        ("vllm-1  | x", "vllm-1"),
        ("[2026-11-29 11:49:34 TP0] x", "TP0"),
        ("[2026-11-29 11:49:34 DP0 TP1] x", "DP0 TP1"),
        ("Nov 20 10:00:00 gpu-01 sglang[7]: [2026-11-29 11:49:34 PP0] x", "gpu-01/PP0"),
        ("[2026-11-29 11:49:34] x", ""),
        (json.dumps(Line(1, "gpu-01", 0, 1, 77, 6, "x").as_json()), "gpu-01/rank1"),
        (json.dumps(Line(1, "gpu-01", 0, None, 77, 6, "x").as_json()), "gpu-01"),
    ],
)
def test_the_process_is_named(line: str, process: str) -> None:
    assert split_prefix(line).process == process


@each_row(
    ("line", "level"),
    [
        (f"{VLLM}x", "ERROR"),
        ("INFO:     x", "INFO"),
        ("[rank1]:[E810 03:04:11.06 P.cpp:1] x", "ERROR"),
        ("[rank1]:[W810 03:04:11.06 P.cpp:1] x", "WARNING"),
        ('{"MESSAGE": "x", "PRIORITY": "3", "_TRANSPORT": "kernel"}', "ERROR"),
        ('{"MESSAGE": "x", "PRIORITY": "3", "_TRANSPORT": "stdout"}', ""),
        ("x", ""),
    ],
)
def test_the_level_is_read(line: str, level: str) -> None:
    assert split_prefix(line).level == level


@each_row(
    "line",
    [
        "ValueError: a: b[7]: c",
        "gpu-01 vllm[7]: without a time before it",
        '  File "x.py", line 1, in f',
        "(see above) RuntimeError: x",
        "[core.py:1] x",
        '{"MESSAGE": 3}',
        '{"half": "an ob',
        "[1] {}",
        "2025-99-99T10:00:00Z",
    ],
)
def test_what_is_no_prefix_stays(line: str) -> None:
    assert split_prefix(line).text in {line, ""}


def test_the_outermost_time_counts() -> None:
    stamp = split_prefix("2025-11-20T11:00:00.5Z (A pid=1) INFO 11-20 10:00:00 [a.py:1] x").stamp
    assert stamp
    assert (stamp.moment.hour, stamp.offset, stamp.has_year) == (11, 0, True)


@each_row(
    ("name", "prefix"),
    [
        *((name, lambda text, before=before: before + text) for name, (before, _) in FORMS.items()),
        *(
            (name, lambda text, form=form: json.dumps(form(text)))
            for name, form in JSON_FORMS.items()
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_line_gives_the_same_finding_behind_any_prefix(name: str, prefix) -> None:
    texts = {
        (rule_id, f"{rule_id} {number}"): split_prefix(line).text
        for rule_id, lines in LINES.items()
        for number, line in enumerate(lines)
    }
    lines = (LogLine(log, 1, prefix(text)) for (_, log), text in texts.items())
    assert set(count_lines(lines, rules()).tallies) == set(texts)


@given(st.text(max_size=300), st.sampled_from([before for before, _ in FORMS.values()]))
def test_any_text_is_taken(text: str, before: str) -> None:
    assert split_prefix(before + text).text in before + text
