"""A batch over real HTTP in a process of its own; the server's record is the other route."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import ROOT
from tests.support.queue_server import SECRET_TEXT, QueueServer, Seen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SLOTS = 16
SHARE = 0.5
"""Of which the batch takes at most so many: 8 requests at once."""


class Batch:
    """An input and its output; `start` begins a process over them."""

    def __init__(self, folder: Path, server: QueueServer) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self._server = server

    def write(self, count: int, tokens: Callable[[int], int] = lambda _number: 4) -> None:
        with self.input.open("w") as file:
            for number in range(count):
                body = {
                    "model": "stand-in",
                    "prompt": f"line {number}",
                    "max_tokens": tokens(number),
                }
                line = {"custom_id": f"id {number}", "url": "/v1/completions", "body": body}
                file.write(json.dumps({**line, "method": "POST"}) + "\n")

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.support.batch_alone", self._server.url]
        return subprocess.Popen(
            [*command, str(self.input), str(self.output), "--slots", str(SLOTS), *options],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *options: str) -> dict[str, Any]:
        """Run it to its end, and return its summary."""
        process = self.start(*options)
        said, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert SECRET_TEXT not in said + errors
        found: dict[str, Any] = json.loads(said)
        return found

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def asked(self) -> list[Seen]:
        """Return the requests of the batch, in the order in which the server got them."""
        return [each for each in self._server.record if str(each.prompt).startswith("line ")]


def test_after_five_kills_each_line_is_answered_once_and_only_those_under_way_were_asked_twice(
    tmp_path: Path,
) -> None:
    moments = sorted(random.Random(7).sample(range(50, 1900), 5))
    with QueueServer(slots=SLOTS, first_seconds=0.004, token_seconds=0.002) as server:
        batch = Batch(tmp_path, server)
        batch.write(2000)
        under_way = set()
        for moment in moments:
            process = batch.start()
            while len(server.record) < moment:
                assert process.poll() is None, process.communicate()
                time.sleep(0.001)
            process.kill()
            process.communicate()
            # What the server had got by then, and the output has no answer to.
            written = {each["custom_id"] for each in whole_lines(batch.output)}
            lines = {str(each.prompt).replace("line", "id") for each in batch.asked()}
            under_way |= lines - written
        summary = batch.run()

        ids = Counter(each["custom_id"] for each in batch.answers())
        times = Counter(str(each.prompt).replace("line", "id") for each in batch.asked())
    assert summary == {"answered": 2000, "failed": {}, "stopped": ""}
    assert ids == Counter(f"id {number}" for number in range(2000))
    twice = {name for name, count in times.items() if count > 1}
    assert times.keys() == ids.keys()
    assert twice <= under_way
    assert 0 < len(twice) <= len(moments) * SLOTS * SHARE


def whole_lines(output: Path) -> list[dict[str, Any]]:
    data = output.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def test_it_takes_a_share_of_what_is_idle(tmp_path: Path) -> None:
    with QueueServer(slots=SLOTS, first_seconds=0.05) as server:
        batch = Batch(tmp_path, server)
        batch.write(300)
        batch.run()
        asked = batch.asked()

    most = max(
        sum(each.arrived <= moment.arrived < (each.ended or 0) for each in asked)
        for moment in asked
    )
    assert most == SLOTS * SHARE


def test_nothing_is_asked_while_requests_of_others_wait_and_it_goes_on_afterwards(
    tmp_path: Path,
) -> None:
    with QueueServer(slots=SLOTS, first_seconds=0.02) as server:
        batch = Batch(tmp_path, server)
        batch.write(400)
        process = batch.start()
        while len(server.record) < 100:
            assert process.poll() is None, process.communicate()
            time.sleep(0.001)
        # 40 requests of 2 s each on 16 slots: the last ones wait for 4 s.
        others = [threading.Thread(target=ask, args=(server, 397)) for _ in range(40)]
        for each in others:
            each.start()
        for each in others:
            each.join()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        asked = batch.asked()
        theirs = [each for each in server.record if each.prompt == "of a user"]

    assert len(theirs) == 40
    assert len(batch.answers()) == len(asked) == 400
    # A second is five looks: by then it has seen those that wait.
    beside = [
        each
        for each in asked
        if any(user.arrived + 1 < each.arrived < (user.began or 0) for user in theirs)
    ]
    assert beside == []
    assert any(each.arrived > max(user.began or 0 for user in theirs) for each in asked)


def ask(server: QueueServer, tokens: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"prompt": "of a user", "max_tokens": tokens})
    connection.request("POST", "/v1/completions", body=body)
    assert connection.getresponse().status == 200
    connection.close()


def test_what_the_fleet_has_no_room_for_or_loses_is_asked_again(tmp_path: Path) -> None:
    faults = ("503", "", "429", "", "closed", "", "cut off", "", "reset", "", "500", "", "", "")
    with QueueServer(slots=SLOTS, first_seconds=0.005, faults=faults) as server:
        batch = Batch(tmp_path, server)
        batch.write(40)
        summary = batch.run()
        answered = Counter(str(each.prompt) for each in batch.asked() if not each.fault)

    assert summary == {"answered": 40, "failed": {}, "stopped": ""}
    assert answered == Counter(f"line {number}" for number in range(40))


def test_a_refusal_is_an_answer_until_failed_lines_are_asked_for_again(tmp_path: Path) -> None:
    with QueueServer(slots=SLOTS, first_seconds=0.005) as server:
        batch = Batch(tmp_path, server)
        batch.write(20, tokens=lambda number: 0 if number in (3, 11) else 4)
        summary, again, asked = batch.run(), batch.run(), len(server.record)
        failed = {each["custom_id"] for each in batch.answers() if each["error"]}
        batch.run("--retry-failed")
        times = Counter(str(each.prompt) for each in batch.asked())

    assert summary == again == {"answered": 18, "failed": {"400": 2}, "stopped": ""}
    assert asked == 20
    assert failed == {"id 3", "id 11"}
    assert {name for name, count in times.items() if count == 2} == {"line 3", "line 11"}


def test_a_line_at_which_servers_fail_is_given_up_and_the_others_are_answered(
    tmp_path: Path,
) -> None:
    with QueueServer(slots=SLOTS, first_seconds=0.005, faults=("500",)) as server:
        batch = Batch(tmp_path, server)
        batch.write(1)
        summary = batch.run()
        tries = len(server.record)

    assert summary["failed"] == {"500": 1}
    assert tries == 5


def test_without_a_fleet_it_ends_in_time_and_says_why(tmp_path: Path) -> None:
    with QueueServer(slots=SLOTS) as server:
        batch = Batch(tmp_path, server)
        batch.write(5)
    summary = batch.run("--patience", "1")

    assert summary["answered"] == 0
    assert summary["failed"] == {}
    assert "no line got an answer for 1 s: " in summary["stopped"]


def test_lines_for_embeddings_and_rankings_are_asked_and_a_number_that_is_none_fails(
    tmp_path: Path,
) -> None:
    """Each route by its own lines in one input; of each five tries are made."""
    rows = [
        ("/v1/embeddings", {"input": "line 0"}),
        ("/rerank", {"query": "line 1", "documents": ["a", "b c"]}),
        ("/v1/embeddings", {"input": [1, 2, 3]}),
    ]
    for faults, answered in ((("",), 3), (("not a number",), 0)):
        with QueueServer(slots=SLOTS, first_seconds=0.004, faults=faults) as server:
            batch = Batch(tmp_path, server)
            lines = [
                {"custom_id": f"id {at}", "url": url, "body": {"model": "stand-in", **body}}
                for at, (url, body) in enumerate(rows)
            ]
            batch.input.write_text("\n".join(map(json.dumps, lines)))
            batch.output = tmp_path / f"{answered}.jsonl"
            found = batch.run()
            asked = Counter(each.path for each in server.record)
        assert found["answered"] == answered
        assert found["failed"] == ({} if answered else {"not a number": 3})
        assert {each["custom_id"] for each in batch.answers()} == {"id 0", "id 1", "id 2"}
        assert set(asked) == {"/v1/embeddings", "/v1/rerank"}
    ranked = next(each for each in json_lines(tmp_path / "3.jsonl") if each["custom_id"] == "id 1")
    assert len(ranked["response"]["body"]["results"]) == 2


def json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
