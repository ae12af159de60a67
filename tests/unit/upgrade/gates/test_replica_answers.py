"""What a node is asked about its replicas: from its own endpoints to the values of gates."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.serving import replica_answers
from gpufleet.planning.stage import Stage
from gpufleet.serving.unit import render_unit
from gpufleet.settings.serving_settings import ModelKind, Served, Vllm
from gpufleet.settings.upgrade_settings import Golden
from gpufleet.upgrade.gates import baseline
from gpufleet.upgrade.gates.baseline import Answer, Counters, Observation, Question
from tests.support.checkout import ROOT
from tests.support.rows import each_row

KEY = "f3a9c1d2e4b5a697"
RECORDED = ROOT / "tests/unit/monitoring/recorded/vllm-0.32.0.txt"
PROMPTS = ("The capital of France is", "1, 2, 3,")
FIRING = {
    "labels": {"alertname": "VllmFrozen", "instance": "gpu-01"},
    "annotations": {"summary": "it is frozen", "runbook": "docs"},
    "startsAt": "2026-11-22T10:00:00Z",
    "status": {"state": "active", "silencedBy": [], "inhibitedBy": []},
}


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM does, and as Alertmanager; `style` is how old or how ill it is."""

    style = "new"
    asked: ClassVar[list[dict[str, Any]]] = []
    firing: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.say(200, RECORDED.read_text())
        elif self.path.startswith("/api/v2/alerts"):
            self.say(200, json.dumps(self.firing))
        else:
            self.say(404, "")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        spoken = self.path == "/v1/audio/transcriptions"
        body = {"form": raw} if spoken else json.loads(raw)
        self.asked.append(body)
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self.say(401, "{}")
        elif self.style == "ill":
            self.say(500, json.dumps({"error": {"message": f"the engine died, key {KEY}"}}))
        elif self.style == "hangs" or (self.style == "hung" and len(self.asked) == 2):
            time.sleep(600)  # its client has to give up
        elif self.path != "/v1/completions":
            self.say(200, json.dumps(self.of_kind(body)))
        else:
            self.say(200, json.dumps({"choices": [self.choice(body)]}))

    def of_kind(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer as vLLM 0.32 does for models that do not complete text, by what was sent."""
        size = float(len(str(body.get("input", ""))))
        if self.path == "/v1/embeddings":
            broken = [None] if self.style == "nan" else [0.1234567890123]
            return {"data": [{"embedding": [size, *broken]}]}
        if self.path == "/rerank":
            scores = {at: float(len(text)) for at, text in enumerate(body["documents"])}
            rows = [{"index": at, "relevance_score": each} for at, each in scores.items()]
            return {"results": sorted(rows, key=lambda row: -row["relevance_score"])}
        if self.path == "/classify":
            return {"data": [{"label": body["input"][:2], "probs": [0.75, 0.25]}]}
        if self.path == "/pooling":
            return {"data": [{"data": [[size], [0.5]]}]}
        return {"text": " hm hm"}

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = list(range(body["max_tokens"]))
        choice: dict[str, Any] = {"text": body["prompt"][::-1], "logprobs": None}
        if self.style in {"new", "hung"} and body.get("return_token_ids"):
            choice["token_ids"] = tokens
        if self.style == "old" and body.get("logprobs"):
            assert body["return_tokens_as_token_ids"]
            choice["logprobs"] = {"tokens": [f"token_id:{token}" for token in tokens]}
        return choice

    def say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(Server, "style", "new")
    monkeypatch.setattr(Server, "asked", [])
    monkeypatch.setattr(Server, "firing", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


Look = Callable[..., Observation]


@pytest.fixture
def look(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    port: int,
) -> Look:
    """Look at `llama-0` of gpu-01, whose unit is as a deploy writes it."""
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/vllm/credentials").mkdir(parents=True)
    (tmp_path / "etc/vllm/credentials/api-key").write_text(KEY + "\n")

    def put_unit(kind: ModelKind) -> None:
        unit = render_unit(
            Stage("llama", 0, "gpu-01", (0,), ("GPU-a",), port, 1, kind=kind),
            Served(model="/srv/llama"),
            Vllm(version="0.32.0", lock="x", listen="0.0.0.0", api_key_file="key"),
            release="0.32.0-1a2b",
            credentials={"api-key": "0" * 64},
        )
        (tmp_path / "etc/systemd/system/vllm-llama-0.service").write_text(unit.content)

    def asked(
        times: int = 1,
        replica: str = "llama-0",
        homes: dict[str, str] | None = None,
        ours: tuple[str, ...] = (),
        prompt_seconds: float = 5,
        *,
        kind: ModelKind = "generate",
    ) -> Observation:
        put_unit(kind)
        questions = [Question(replica, ("gpu-01",), Golden(prompts=PROMPTS, max_tokens=3), times)]
        caught: dict[str, Any] = {}
        with monkeypatch.context() as patch:
            patch.setattr(
                baseline.payload, "program", lambda name, **given: caught.update(given) or name
            )
            baseline.program("gpu-01", questions, (homes or {}).get("gpu-01"))
        monkeypatch.setattr(replica_answers, "PARAMETERS", {**caught, "seconds": prompt_seconds})
        replica_answers.main()
        printed = capfd.readouterr().out
        assert KEY not in printed
        return baseline.read_answers(
            {"gpu-01": json.loads(printed)}, questions, time.time(), tuple(homes or ()), ours
        )

    return asked


@pytest.mark.parametrize("style", ["new", "old"])
def test_prompts_are_answered_in_tokens_by_any_release(
    look: Look, monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    monkeypatch.setattr(Server, "style", style)
    seen = look(times=2)

    answer = Answer(PROMPTS[0][::-1], (0, 1, 2))
    assert seen.answers["llama-0"][PROMPTS[0]] == (answer, answer)
    assert set(seen.answers["llama-0"]) == set(PROMPTS)
    first = Server.asked[0]
    assert (first["temperature"], first["seed"], first["model"]) == (0, 0, "llama")


def test_every_prompt_is_put_once_before_any_is_put_again(look: Look) -> None:
    look(times=2)

    assert [each["prompt"] for each in Server.asked] == [*PROMPTS, *PROMPTS]


def test_a_release_that_tells_no_tokens_gives_its_text(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "style", "ancient")

    assert look().answers["llama-0"][PROMPTS[1]] == (Answer(PROMPTS[1][::-1]),)


def test_a_vector_is_kept_to_six_digits(look: Look) -> None:
    seen = look(times=2, kind="embed").answers["llama-0"]

    vector = Answer("2 numbers", kind="embed", numbers=(float(len(PROMPTS[0])), 0.123457))
    assert seen[PROMPTS[0]] == (vector, vector)
    assert [each["input"] for each in Server.asked] == [*PROMPTS, *PROMPTS]


def test_prompts_are_a_rerankers_documents_and_each_has_its_place(look: Look) -> None:
    """One request ranks them all; a place counts from 1."""
    seen = look(times=2, kind="rerank").answers["llama-0"]

    longest, shortest = map(float, map(len, PROMPTS))
    first = Answer("1", kind="rerank", numbers=(longest,))
    assert seen[PROMPTS[0]] == (first, first)
    assert seen[PROMPTS[1]][0] == Answer("2", kind="rerank", numbers=(shortest,))
    assert [each["documents"] for each in Server.asked] == [[*PROMPTS]] * 2
    assert Server.asked[0]["query"] == Golden().query


def test_labels_rewards_and_words_are_read_by_kind(look: Look) -> None:
    """The kind is that of the unit that runs, whatever settings say by now."""
    said = {
        kind: look(kind=kind).answers["llama-0"][PROMPTS[0]][0]
        for kind in ("classify", "reward", "transcribe")
    }
    size = float(len(PROMPTS[0]))
    assert said["classify"] == Answer("Th", kind="classify", numbers=(0.75, 0.25))
    assert said["reward"] == Answer("2 numbers", kind="reward", numbers=(size, 0.5))
    assert said["transcribe"] == Answer(" hm hm", kind="transcribe")
    assert PROMPTS[0].encode() in Server.asked[-2]["form"]


def test_a_vector_that_is_not_finite_is_no_answer(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "style", "nan")
    (said,) = look(kind="embed").answers["llama-0"][PROMPTS[0]]

    assert "1 of the 2 numbers of its vector are not finite" in said.error
    assert said.numbers is None


def test_its_counters_are_those_of_its_metrics(look: Look) -> None:
    (counted,) = look().readings["llama-0"].servers.values()

    assert counted == baseline.counters(RECORDED.read_text())


def test_an_error_is_told_without_the_key(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "style", "ill")
    (answer,) = look().answers["llama-0"][PROMPTS[0]]

    assert "HTTP 500" in answer.error
    assert "the engine died" in answer.error


@pytest.mark.parametrize(("times", "asked"), [(1, 1), (2, 2)])
def test_a_server_that_hangs_is_not_asked_further_and_has_a_deadline(
    look: Look, monkeypatch: pytest.MonkeyPatch, times: int, asked: int
) -> None:
    """Before a change once more, for there would be nothing to compare with; after it never."""
    monkeypatch.setattr(Server, "style", "hangs")
    answers = look(times=times, prompt_seconds=1.5).answers["llama-0"]

    assert all("timed out" in each.error for said in answers.values() for each in said)
    assert [len(said) for said in answers.values()] == [times, times]
    assert len(Server.asked) == asked


@pytest.mark.parametrize(("times", "errors"), [(1, [False, True]), (2, [False] * 4)])
def test_one_answer_that_did_not_come_costs_no_baseline(
    look: Look, monkeypatch: pytest.MonkeyPatch, times: int, errors: list[bool]
) -> None:
    """The second prompt hangs once; what came instead is said to each question in its place."""
    monkeypatch.setattr(Server, "style", "hung")
    answers = look(times=times, prompt_seconds=3).answers["llama-0"]

    assert [bool(each.error) for said in answers.values() for each in said] == errors
    assert answers[PROMPTS[0]][0].text == PROMPTS[0][::-1]


def test_a_replica_without_a_unit_is_not_known(look: Look) -> None:
    seen = look(replica="llama-7")

    (why,) = seen.readings["llama-7"].servers.values()
    assert "no vllm-llama-7.service" in str(why)
    assert all(each.error for each in seen.answers["llama-7"][PROMPTS[0]])
    assert not any(each.asked for each in seen.answers["llama-7"][PROMPTS[0]])


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({}, True),
        ({"silencedBy": ["ours"]}, True),
        ({"silencedBy": ["a person's"]}, False),
        ({"silencedBy": ["ours", "a person's"]}, False),
        ({"inhibitedBy": ["another"]}, False),
    ],
)
def test_alerts_that_a_person_silenced_are_none_and_our_own_silences_hide_nothing(
    look: Look, port: int, status: dict[str, Any], shown: bool
) -> None:
    firing = {**FIRING, "status": {"silencedBy": [], "inhibitedBy": [], **status}}
    Server.firing.append(firing)
    seen = look(homes={"gpu-01": f"http://127.0.0.1:{port}"}, ours=("ours",))

    assert [each.name for each in seen.alerts.alerts] == ["VllmFrozen"] * shown
    assert not seen.alerts.problems


def test_an_alertmanager_that_is_not_there_is_a_problem(look: Look) -> None:
    seen = look(homes={"gpu-01": "http://127.0.0.1:9"})

    assert not seen.alerts.alerts
    assert "gpu-01" in seen.alerts.problems[0]


@each_row(
    "said",
    [
        "gpu-01 did not answer",
        {},
        {"schema": 2},
        {"schema": 1, "replicas": []},
        {"schema": 1, "replicas": {"llama-0": {"servers": {"u": {"golden": 3}}}}},
        {"schema": 1, "replicas": {"llama-0": {"missing": "timeout", "seconds": 90}}},
        {"schema": 1, "replicas": {"llama-0": {"servers": {"u": {"golden": [], "metrics": {}}}}}},
        {
            "schema": 1,
            "replicas": {
                "llama-0": {"servers": {"u": {"golden": [], "metrics": {"text": "up 1"}}}}
            },
        },
    ],
)
def test_what_makes_no_sense_is_not_known_and_raises_nothing(said: Any) -> None:
    question = Question("llama-0", ("gpu-01",))
    seen = baseline.read_answers({"gpu-01": said}, [question], 0, ("gpu-01",))

    assert all(isinstance(each, str) for each in seen.readings["llama-0"].servers.values())
    assert seen.readings["llama-0"].servers
    assert seen.alerts.problems


def test_a_rank_without_a_server_adds_nothing() -> None:
    """The second node of a replica runs a rank alone: the first one's server is all there is."""
    text = RECORDED.read_text()
    first = {"servers": {"http://127.0.0.1:8000": {"golden": [], "metrics": {"text": text}}}}
    said = {
        "gpu-01": {"schema": 1, "replicas": {"llama-0": first}},
        "gpu-02": {"schema": 1, "replicas": {"llama-0": {"servers": {}}}},
    }
    seen = baseline.read_answers(said, [Question("llama-0", ("gpu-01", "gpu-02"))], 0)

    (server,) = seen.readings["llama-0"].servers.values()
    assert isinstance(server, Counters)


def test_a_node_without_anything_to_look_at_gets_no_program() -> None:
    assert baseline.program("gpu-09", [Question("llama-0", ("gpu-01",))]) is None
    assert baseline.program("gpu-01", [Question("llama-0", ("gpu-01",))]) is not None
