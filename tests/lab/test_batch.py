"""
A batch through a gateway with TLS, on real servers, beside clients that are not gpufleet's.

Two nodes with a replica each. `make test-long PART=batch` writes what it measured into
docs/measured/batch.md.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.lab.gateway_pair import until
from tests.lab.upgrade_load import Summary, summary
from tests.lab.walk import NODES, UNI_FLAGS, TlsFleet, gateway_fleet
from tests.support.checkout import ROOT, own_lab
from tests.support.measured import note

LAB_ID = own_lab("gfba")
LINES = 200
MANY, KILLS = 2000, 5
"""Lines of the batch that is killed, of `FEW_TOKENS` each, and how often it is."""
FEW_TOKENS = 2
RATE = 1.0
PAGE = "measured/batch.md"

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsFleet]:
    with gateway_fleet(LAB_ID, tmp_path_factory.mktemp("batch"), flags=UNI_FLAGS) as found:
        yield found


class Batch:
    """A file of requests, its output, and the command over them."""

    def __init__(self, fleet: TlsFleet, name: str, tokens: int = 16, count: int = LINES) -> None:
        self.fleet, self.count = fleet, count
        self.input, self.output = (fleet.project / f"{name}-{end}.jsonl" for end in ("in", "out"))
        self.key = fleet.project / "batch-key"
        self.key.write_text(fleet.key_of_clients)
        self.output.unlink(missing_ok=True)
        with self.input.open("w") as file:
            for number in range(count):
                file.write(json.dumps(line(number, tokens)) + "\n")

    def start(self, *options: str) -> subprocess.Popen[str]:
        gpufleet = str(Path(sys.executable).with_name("gpufleet"))
        command = [gpufleet, "batch", self.fleet.inventory, "tiny", str(self.input)]
        command += ["-o", str(self.output), "--key-file", str(self.key), "--json", *options]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.fleet.env(), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def answered(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def has(self, answers: int, process: subprocess.Popen[str]) -> bool:
        """Return whether there are so many answers, or the process is over."""
        return self.answered() >= answers or process.poll() is not None

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.output.read_text().splitlines()]

    def answers(self) -> dict[str, str]:
        """Return the number that each line's answer has been given, of whole lines of the output.

        A line that was asked once more would have another one.
        """
        whole, _, _ = self.output.read_text().rpartition("\n")
        return {each["custom_id"]: each["id"] for each in map(json.loads, whole.splitlines())}

    def all_once(self) -> None:
        found = self.lines()
        ids = sorted(each["custom_id"] for each in found)
        assert ids == sorted(f"id {number}" for number in range(self.count))
        assert {each["response"]["status_code"] for each in found} == {200}
        assert all(each["response"]["body"]["choices"] for each in found)


def line(number: int, tokens: int = 16) -> dict[str, Any]:
    """Return a line of the input; every fourth is a chat."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": tokens, "temperature": 0}
    body["ignore_eos"] = True
    url = "/v1/completions"
    if number % 4:
        body["prompt"] = f"prompt {number}"
    else:
        url, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": f"{number}"}]
    return {"custom_id": f"id {number}", "method": "POST", "url": url, "body": body}


def finish(process: subprocess.Popen[str], seconds: float = 900) -> dict[str, Any]:
    """Wait for a command that has to succeed, and return its summary."""
    said, errors = process.communicate(timeout=seconds)
    print(errors)
    assert process.returncode == 0, said + errors
    found: dict[str, Any] = json.loads(said)
    return found


def counted(fleet: TlsFleet, name: str, labels: str = "", nodes: tuple[str, ...] = NODES) -> float:
    """Return the sum of a metric over nodes' servers, asked on the nodes."""
    total = 0.0
    for node in nodes:
        page = fleet.ssh(node, "curl -sf http://127.0.0.1:8000/metrics")
        found = re.findall(rf"^{name}\{{[^}}]*{labels}[^}}]*\}} (\S+)$", page, re.MULTILINE)
        assert found, f"{node} has no {name}"
        total += sum(map(float, found))
    return total


def test_users_beside_a_batch_lose_nothing_and_wait_for_nothing(fleet: TlsFleet) -> None:
    """The other route is what servers and an OpenAI client saw."""
    with fleet.load("alone", rate=RATE) as users:
        until(lambda: len(users.requests()) >= 40, "users without a batch", 300)
    alone = summary(users.requests())

    batch = Batch(fleet, "beside")
    done = counted(fleet, "vllm:request_success_total")
    queue = {edge: queued(fleet, edge) for edge in ("1.0", r"\+Inf")}
    with fleet.load("users", rate=RATE) as users:
        began = time.monotonic()
        found = finish(batch.start())
        seconds = time.monotonic() - began
    beside = summary(users.requests())

    batch.all_once()
    assert (found["answered"], found["failed"], found["left"]) == (LINES, {}, 0)
    assert found["completion_tokens"] > 0
    assert counted(fleet, "vllm:request_success_total") - done >= LINES + beside.requests
    assert beside.failed == 0, beside.failures
    slow = (queued(fleet, r"\+Inf") - queue[r"\+Inf"]) - (queued(fleet, "1.0") - queue["1.0"])
    note_row("beside users", LINES, seconds, slow, (beside, alone))
    assert slow == 0, "a request waited in a server for more than a second"


def queued(fleet: TlsFleet, edge: str) -> float:
    """Return how many requests waited in servers for at most so many seconds."""
    return counted(fleet, "vllm:request_queue_time_seconds_bucket", f'le="{edge}"')


def note_row(
    what: str, lines: int, seconds: float, slow: float, users: tuple[Summary, Summary | None]
) -> None:
    """Write a measured row; `users` are what clients saw beside the batch, and without it."""
    beside, alone = users
    row = [
        what, f"{lines}", f"{seconds:.0f} s", f"{lines / seconds:.1f}",
        f"{beside.requests}", f"{beside.failed}", f"{slow:.0f}",
        f"{alone.ttft_p50:.3f} s" if alone else "-", f"{beside.ttft_p50:.3f} s",
    ]  # fmt: skip
    print(" | ".join(row), flush=True)
    note(PAGE, *row)


def test_after_five_kills_each_line_is_answered_once_and_users_lose_nothing(
    fleet: TlsFleet,
) -> None:
    """It is killed when a sixth of the lines is answered, then another one, and so on."""
    batch = Batch(fleet, "killed", FEW_TOKENS, MANY)
    done = counted(fleet, "vllm:request_success_total")
    waited = {edge: queued(fleet, edge) for edge in ("1.0", r"\+Inf")}
    kept: dict[str, str] = {}
    with fleet.load("beside-kills", rate=RATE) as users:
        began = time.monotonic()
        for kill in range(1, KILLS + 1):
            process = batch.start()
            least = MANY * kill // (KILLS + 1)
            until(partial(batch.has, least, process), f"{least} answers", 300)
            over = process.poll()
            process.kill()
            said, errors = process.communicate(timeout=60)
            assert over is None, f"it was over before it was killed: {said}{errors}"
            assert kept.items() <= batch.answers().items(), "an answer is gone"
            kept = batch.answers()
            print(f"kill {kill}: {len(kept)} of {MANY} lines are answered", flush=True)
        assert len(kept) < MANY
        found = finish(batch.start())
        seconds = time.monotonic() - began
    beside = summary(users.requests())

    batch.all_once()
    assert kept.items() <= batch.answers().items()
    assert (found["answered"], found["failed"], found["left"]) == (MANY, {}, 0)
    # What the servers finished is the other route: twice are at most those under way at a kill.
    most = KILLS * len(NODES) * int(UNI_FLAGS["max-num-seqs"])
    least = MANY + beside.requests
    assert least <= counted(fleet, "vllm:request_success_total") - done <= least + most
    assert beside.failed == 0, beside.failures
    slow = (queued(fleet, r"\+Inf") - waited[r"\+Inf"]) - (queued(fleet, "1.0") - waited["1.0"])
    note_row("killed five times", MANY, seconds, slow, (beside, None))


def test_a_drained_replica_works_on_a_batch_alone(fleet: TlsFleet) -> None:
    other, node = NODES
    [unit] = (name.split()[1] for name in fleet.pids() if name.startswith(f"{node} "))
    replica = unit.removeprefix("vllm-").removesuffix(".service")
    done = fleet.gpufleet("drain", fleet.inventory, node, "--why", "a batch", seconds=300)
    assert done.status == 0, done.output
    try:
        before = counted(fleet, "vllm:request_success_total", nodes=(other,))
        batch = Batch(fleet, "drained")
        found = finish(batch.start("--replica", replica, "--guest", "1"))
        after = counted(fleet, "vllm:request_success_total", nodes=(other,))
    finally:
        done = fleet.gpufleet("undrain", fleet.inventory, node, seconds=300)
    assert done.status == 0, done.output
    batch.all_once()
    assert (found["answered"], after - before) == (LINES, 0)


def test_a_signal_ends_it_with_what_to_type(fleet: TlsFleet) -> None:
    batch = Batch(fleet, "signalled")
    process = batch.start()
    until(lambda: batch.answered() >= 5, "five answers", 300)
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=60)

    assert process.returncode == 128 + signal.SIGTERM, errors
    assert json.loads(said)["left"] == LINES - batch.answered() > 0
    assert f"interrupted: to continue, run: gpufleet batch {fleet.inventory} tiny" in errors
    assert "Traceback" not in errors
    assert fleet.key_of_clients not in said + errors


def test_a_batch_goes_on_through_the_waves_of_an_upgrade(fleet: TlsFleet) -> None:
    """Both replicas are drained, restarted and put back, one after the other."""
    before = set(fleet.pids().values())
    fleet.declare_model(flags={**UNI_FLAGS, "max-num-seqs": 12})
    # One at a time, and more of them than any upgrade lasts.
    batch = Batch(fleet, "upgrade", tokens=300, count=5000)
    process = batch.start("--concurrency", "1")
    until(lambda: batch.answered() >= 5, "five answers", 300)
    upgraded = fleet.upgrade()
    at_its_end = batch.answered()
    assert upgraded.returncode == 0, upgraded.stdout[-3000:]
    until(lambda: batch.has(at_its_end + 5, process), "five more answers", 300)
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=60)

    found = json.loads(said)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert (found["failed"], found["left"]) == ({}, 5000 - batch.answered())
    assert len(batch.answers()) == batch.answered() > at_its_end > 5
    assert {each["response"]["status_code"] for each in batch.lines()} == {200}
    assert not before & set(fleet.pids().values())
    assert set(fleet.seqs().values()) == {"12"}
    print(f"{at_its_end} lines were answered when the upgrade ended")


def test_what_cannot_be_asked_is_refused_before_anything_is(fleet: TlsFleet) -> None:
    batch = Batch(fleet, "refused")
    done = counted(fleet, "vllm:request_success_total")
    with batch.input.open("a") as file:
        file.write(json.dumps({**line(0), "custom_id": "e", "url": "/v1/embeddings"}) + "\n")
    said, errors = batch.start().communicate(timeout=120)
    assert "has no path /v1/embeddings for tiny (status 404)" in errors, said + errors

    batch = Batch(fleet, "refused")
    batch.key.write_text("another-key")
    _, errors = batch.start().communicate(timeout=120)
    assert "no client of the gateway has this key" in errors
    assert batch.answered() == 0
    assert counted(fleet, "vllm:request_success_total") == done
