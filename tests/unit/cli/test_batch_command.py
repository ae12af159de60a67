"""`gpufleet batch`: what it refuses before a node is asked, and what it prints."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from gpufleet.batch.batch_input import CheckedInput, Line
from gpufleet.batch.batch_output import BatchOutput
from gpufleet.batch.replies import Reply, Totals, judge, output_line
from gpufleet.cli.batch_command import summary_lines
from gpufleet.cli.batch_session import BatchOptions, Session, Summary
from gpufleet.errors import FleetError
from tests.support import warm_command

INVENTORY = """
from gpufleet import inventory
from tests.support import warm_command

globals().update(inventory.load(__file__, groups={"gpu": ["gpu-01"], "gateway": ["lb-01"]}))
"""
GPU = """
vllm: {version: 0.32.0, lock: locks/vllm-0.32.0.txt, api_key_file: key}
serving: {llama: {model: meta/llama, revision: "%s", served_name: llama-3}}
""" % ("0" * 40)
GATEWAY = """
gpu_node: false
gateway: {allow_plain_http: true, clients: [{name: a, key_sha256: "%s"}], max_body_mib: 1}
""" % ("0" * 64)
LINE = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "llama-3", "prompt": "the-prompt-of-a-user"},
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in (
        ("inventories/prod.py", INVENTORY),
        ("group_vars/gpu.yml", GPU),
        ("group_vars/gateway.yml", GATEWAY),
        ("in.jsonl", json.dumps(LINE)),
    ):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm_command.run(["batch", "inventories/prod.py", *words], cwd=project, timeout=120)


def test_wrong_lines_are_refused_before_a_node_is_asked_and_nothing_is_written(
    project: Path,
) -> None:
    wrong = {**LINE, "body": {"model": "llama", "prompt": "the-prompt-of-a-user" * 60_000}}
    (project / "in.jsonl").write_text(f"{json.dumps(LINE)}\n{json.dumps(wrong)}\n{{")

    done = run(project, "llama", "in.jsonl", "-o", "out.jsonl")

    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        'error: in.jsonl: line 2: `model` is "llama": write "llama-3"',
        "error: in.jsonl: line 3: the line is not JSON: the text is incomplete",
    ]
    assert not list(project.glob("out*"))


def test_a_model_that_is_not_served_is_refused(project: Path) -> None:
    done = run(project, "lama", "in.jsonl", "-o", "out.jsonl")

    assert done.returncode == 2
    assert "`serving` has no 'lama'; did you mean 'llama'?" in done.stderr


def test_what_is_answered_is_summed_up_without_a_node(project: Path) -> None:
    """Its hash is that of sha256sum: nodes that do not exist are not asked."""
    sums = subprocess.run(
        ["sha256sum", project / "in.jsonl"], capture_output=True, text=True, check=True
    )
    of = CheckedInput(1, sums.stdout.split()[0], ())
    output = BatchOutput(project / "out.jsonl", of, "llama-3", retry_failed=False)
    output.add(output_line(Line("1", "", b""), judge(Reply(400, b"{}"))))
    output.close()

    plain = run(project, "llama", "in.jsonl", "-o", "out.jsonl")
    found = run(project, "llama", "in.jsonl", "-o", "out.jsonl", "--json")

    assert (plain.returncode, plain.stderr) == (1, "")
    assert plain.stdout.startswith("out.jsonl: 0 of 1 line answered, 1 failed, 0 left; ")
    assert "failed: 1 with 400" in plain.stdout
    assert json.loads(found.stdout)["failed"] == {"400": 1}


def test_a_summary_names_failures_by_their_kind() -> None:
    totals = Totals(3, Counter({"400": 2, "timeout": 1}), 30, 12)

    assert summary_lines(Summary(Path("o"), 8, totals, 61.0, "interrupted")) == [
        "o: 3 of 8 lines answered, 3 failed, 2 left; 30 prompt and 12 completion tokens; 1 min 1 s",
        "failed: 2 with 400",
        "failed: 1 with timeout",
    ]


@pytest.mark.parametrize(
    ("typed", "settings", "most"),
    [(None, "", 500), (7, "", 7), (None, ", source_connections: 90", 45), (9999, "", 500)],
)
def test_no_more_requests_are_under_way_than_a_gateway_takes_of_one_address(
    project: Path, typed: int | None, settings: str, most: int
) -> None:
    file = project / "group_vars/gateway.yml"
    file.write_text(file.read_text().replace("max_body_mib: 1", f"max_body_mib: 1{settings}"))
    wanted = BatchOptions(
        "llama", Path("i"), Path("o"), None, None, None, None, 0.5, typed, 9, False
    )

    assert Session(str(project / "inventories/prod.py"), wanted)._most == most


def test_a_gateway_that_listens_on_its_own_node_only_is_refused(project: Path) -> None:
    file = project / "group_vars/gateway.yml"
    file.write_text(file.read_text().replace("max_body_mib", "listen: 127.0.0.1, max_body_mib"))

    done = run(project, "llama", "in.jsonl", "-o", "out.jsonl")

    assert done.returncode == 2
    assert "lb-01: the gateway listens only on localhost (`gateway.listen`)" in done.stderr


def test_a_replica_and_a_gateway_exclude_each_other() -> None:
    with pytest.raises(FleetError, match="--replica and --gateway exclude each other"):
        BatchOptions("a", Path("i"), Path("o"), "a-0", "lb", None, None, 0.5, None, 9, False)
