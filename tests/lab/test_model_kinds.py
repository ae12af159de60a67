"""Every kind of model on nodes: deployed, asked by plain HTTP, upgraded and back.

Tests run in the order in which they stand: each takes the fleet as the one before left it.
"""

from __future__ import annotations

import json
import math
import operator
import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import pytest

from gpufleet.on_node.serving import questions
from lab import fake_hub, package_mirror, tiny_kinds, tiny_speech, tiny_vision
from tests.lab import media_release
from tests.lab.upgrade_fleet import FLAGS, NEW, UpgradeFleet, upgrade_fleet
from tests.support.checkout import own_lab

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

NODES = ("gpu-01", "gpu-02")
REPLICAS: dict[tiny_kinds.Kind, int] = {"embed": 2, "rerank": 1, "classify": 1}
VISION, SPEECH = "vision", "speech"
"""A model that completes text and sees pictures; one that writes what it hears."""
SHARES = {"rerank": 0.3, "classify": 0.3, VISION: 0.3}
"""These have one of the four GPUs."""
REQUESTS, CLIENTS = 5000, 3
"""That clients of all kinds send in all while a fleet is changed, and how many they are."""
BETWEEN_SECONDS = 0.2
"""Of a client, after an answer: a server that starts beside them needs some of the two cores."""
LENGTHS = {"embed": "16", "rerank": "4,8,2", VISION: "4,16,32", SPEECH: "1"}
"""Of requests that `gpufleet measure` sends: a text, a query with documents, a question about a
picture of 32 pixels, a second of sound."""
SEQUENCES = "max-num-seqs"


@dataclass
class KindsFleet(UpgradeFleet):
    """Two nodes of two GPUs each, and a model of each kind."""

    first: str = NEW

    def lay_out(self) -> None:
        super().lay_out()
        tiny = self.wanted["serving"].pop("tiny")
        flags = {**FLAGS, "max-model-len": 256}
        hub = self.state.dir / package_mirror.MODELS
        for kind, replicas in REPLICAS.items():
            name = f"lab/tiny-{kind}"
            revision = fake_hub.revision_of(tiny_kinds.write(hub / name, kind))
            own = {"model": name, "revision": revision, "replicas": replicas, "flags": flags}
            self.wanted["serving"][kind] = {**tiny, **own}
        for kind, write in ((VISION, tiny_vision.write), (SPEECH, tiny_speech.write)):
            name = f"lab/tiny-{kind}"
            own = {"model": name, "revision": fake_hub.revision_of(write(hub / name))}
            self.wanted["serving"][kind] = {**tiny, **own, "replicas": 1, "flags": flags}
        # The encoder's 1500 positions are taken in one step.
        speech = {**flags, "max-num-batched-tokens": 2048, "max-model-len": 32}
        self.wanted["serving"][SPEECH]["flags"] = speech
        for served in self.wanted["serving"].values():
            served["objectives"] = {"e2e_p99_seconds": 60}
        for kind, share in SHARES.items():
            self.wanted["serving"][kind]["gpu_share"] = share
            del self.wanted["serving"][kind]["tensor_parallel"]
        self.declare(gpus={"reserved": []})
        self.offer_wheels(*media_release.make(self.project / "made"))

    def set_flag(self, model: str, name: str, value: Any) -> None:
        """Declare a flag of a model."""
        served = self.wanted["serving"][model]
        flags = {**served["flags"], name: value}
        self.declare(serving={model: {**served, "flags": flags}})

    def urls(self, model: str) -> list[str]:
        """Return where a model's replicas answer, as their units on the nodes say."""
        find = f"grep -h ^Port= /etc/systemd/system/vllm-{model}-*.service 2>/dev/null; :"
        return [
            f"http://{self.address(node)}:{line.partition('=')[2]}"
            for node in NODES
            for line in self.ssh(node, find).split()
        ]

    def ask(self, model: str, path: str, **body: Any) -> list[Any]:
        """Return what each replica of a model answers to a request of plain HTTP."""
        head = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        found = []
        for url in self.urls(model):
            data = json.dumps({"model": model, **body}).encode()
            request = urllib.request.Request(url + path, data, head)
            with urllib.request.urlopen(request, timeout=60) as answer:
                found.append(json.load(answer))
        return found

    def status_of(self, model: str, *, until: str) -> dict[str, Any]:
        """Return what `gpufleet status --completion` says of a replica once it is so."""
        end = time.monotonic() + 300
        while True:
            status = self.gpufleet("status", self.inventory, "--completion", "--json", seconds=200)
            found = json.loads(status.stdout)["replicas"]
            [said] = (each for each in found if each["replica"] == f"{model}-0")
            if said["state"] == until or time.monotonic() > end:
                assert said["state"] == until, said
                return dict(said)
            time.sleep(2)

    def deployed(self) -> str:
        """Run the main deploy to its end and return what it changed."""
        run = self.pyinfra("-y", "--json", seconds=1800)
        assert run.status == 0, run.output
        return json.dumps(run.changed)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindsFleet]:
    project = tmp_path_factory.mktemp("kinds")
    with upgrade_fleet(own_lab("gfmk"), project, NODES, also=(), kind=KindsFleet) as found:
        yield found


def test_a_deploy_ends_when_a_model_of_each_kind_answers(kinds: KindsFleet) -> None:
    run = kinds.pyinfra("-y", seconds=1800)
    assert run.status == 0, run.output

    vectors = [each["data"][0]["embedding"] for each in kinds.ask(
        "embed", "/v1/embeddings", input="Hello")]  # fmt: skip
    assert len(vectors) == REPLICAS["embed"]
    for vector in vectors:
        assert len(vector) == tiny_kinds.HIDDEN
        assert math.dist(vector, [0] * len(vector)) == pytest.approx(1, abs=1e-3)
    texts = {"query": questions.QUERY, "documents": [*questions.DOCUMENTS]}
    [ranked] = kinds.ask("rerank", "/rerank", **texts)
    scores = {row["index"]: row["relevance_score"] for row in ranked["results"]}
    assert scores[0] + 0.3 < scores[1]
    [said] = kinds.ask("classify", "/classify", input="Where is my parcel?")
    assert said["data"][0]["label"] in tiny_kinds.LABELS["classify"]
    head = {"Authorization": f"Bearer {kinds.key}"}
    [sees] = kinds.urls(VISION)
    seen = answered(sees, head, questions.question(questions.PICTURE, VISION))
    assert seen["usage"]["prompt_tokens"] > len("user: Which colour is this?")
    [hears] = kinds.urls(SPEECH)
    assert isinstance(answered(hears, head, questions.question("transcribe", SPEECH))["text"], str)


def test_their_units_say_what_they_are(kinds: KindsFleet) -> None:
    cat = "cat /etc/systemd/system/vllm-*.service"
    lines = [line.strip(" \\") for node in NODES for line in kinds.ssh(node, cat).splitlines()]
    assert lines.count("--runner pooling") == sum(REPLICAS.values())
    assert not any(line.startswith("Kind=generate") for line in lines)
    for kind, replicas in REPLICAS.items():
        assert lines.count(f"Kind={kind}") == replicas


def test_a_second_run_changes_nothing(kinds: KindsFleet) -> None:
    before = kinds.pids()
    assert kinds.deployed() == "{}"
    assert kinds.pids() == before


def test_status_and_verify_ask_each_by_its_kind(kinds: KindsFleet) -> None:
    status = kinds.gpufleet("status", kinds.inventory, "--completion", "--json", seconds=200)
    assert status.status == 0, status.output
    said = {each["replica"]: each for each in json.loads(status.stdout)["replicas"]}
    assert {name: each["state"] for name, each in said.items()} == dict.fromkeys(said, "serves")
    assert {name.rpartition("-")[0] for name in said} == {*REPLICAS, VISION, SPEECH}

    run = kinds.pyinfra("-y", deploy="deploys/verify.py", seconds=600)
    # Each problem of a stage begins with its unit; there may be some of exporters.
    assert not re.search(r"vllm-\w+-\d+\.service: ", run.output), run.output


def test_the_plan_foretells_the_tokens_that_each_server_logs(kinds: KindsFleet) -> None:
    """Encoders keep none; a Whisper keeps its text's, and what it heard."""
    run = kinds.gpufleet("plan", kinds.inventory, "--json", seconds=200)
    assert run.status == 0, run.output
    rows = [each for each in json.loads(run.stdout)["candidates"] if each["chosen"]]
    foretold = {each["model"]: each["kv_cache_tokens"] or 0 for each in rows}
    assert {name: foretold[name] for name in REPLICAS} == dict.fromkeys(REPLICAS, 0)
    assert foretold[VISION] > 0
    assert foretold[SPEECH] > 0
    for model in (*REPLICAS, VISION, SPEECH):
        unit = f"vllm-{model}-0.service"
        journal = f"journalctl -u {unit} -o cat --no-pager 2>/dev/null; :"
        log = "".join(kinds.ssh(node, journal) for node in NODES)
        said = re.findall(r"KV cache size: ([\d,]+) tokens", log)
        assert [int(each.replace(",", "")) for each in said[-1:]] in ([foretold[model]], [])
        assert bool(said) or foretold[model] == 0, log[-2000:]


@pytest.mark.parametrize("model", LENGTHS)
def test_measure_sends_what_a_model_of_the_kind_takes(kinds: KindsFleet, model: str) -> None:
    run = kinds.gpufleet(
        "measure", kinds.inventory, model, "--replica", f"{model}-0", "--lengths", LENGTHS[model],
        "--concurrency", "1", "--seconds", "10", "--processes", "1", "--json", seconds=300,
    )  # fmt: skip
    assert run.status in {0, 1}, run.output  # 1: too few answers for a verdict
    [level] = json.loads(run.stdout)["levels"]
    assert level["requests"] > 0, run.output
    assert level["errors"] == {}, run.output


def test_a_model_that_sees_and_refuses_pictures_does_not_serve(kinds: KindsFleet) -> None:
    """A drop-in limits pictures to none: text is completed as before."""
    unit = f"vllm-{VISION}-0.service"
    file = f"/etc/systemd/system/{unit}"
    [node] = (each for each in NODES if kinds.ssh(each, f"ls {file} 2>/dev/null; :"))
    _, _, rest = kinds.ssh(node, f"cat {file}").partition("\nExecStart=")
    lines = rest.splitlines()
    last = next(at for at, line in enumerate(lines) if not line.endswith("\\"))
    command = "\n".join(lines[: last + 1])
    flag = "--limit-mm-per-prompt.image 0"
    drop_in = f"[Service]\nExecStart=\nExecStart={command} \\\n    {flag}\n"
    again = f"systemctl daemon-reload && systemctl restart {unit}"
    kinds.ssh(node, f"mkdir {file}.d && cat > {file}.d/less.conf && {again}", stdin=drop_in)
    try:
        said = kinds.status_of(VISION, until="wrong")
    finally:
        kinds.ssh(node, f"rm -r {file}.d && {again}")
    assert "a chat about a picture fails: " in said["why"][0]
    assert "flags.limit-mm-per-prompt: {image: 0}" in said["why"][0]
    assert kinds.status_of(VISION, until="serves")["why"] == []


def test_a_reranker_that_does_not_rank_does_not_serve(kinds: KindsFleet) -> None:
    """Its classifier gets the other sign: all scores are finite, and in the other order."""
    unit = "vllm-rerank-0.service"
    file = f"/etc/systemd/system/{unit}"
    [node] = (each for each in NODES if kinds.ssh(each, f"ls {file} 2>/dev/null; :"))
    folder = kinds.ssh(node, f"sed -n 's/^RequiresMountsFor=//p' {file}").strip()
    weights = kinds.lab.root(node) / folder.lstrip("/") / "model.safetensors"
    right = weights.read_bytes()

    def serve(content: bytes) -> None:
        kinds.ssh(node, f"systemctl stop {unit}")
        weights.write_bytes(content)
        kinds.ssh(node, f"systemctl start {unit}")

    try:
        serve(negated(right, "classifier.weight"))
        said = kinds.status_of("rerank", until="wrong")
    finally:
        serve(right)
    assert "a ranking fails: for " in said["why"][0]
    assert f"{questions.UNRANKED}. If the model does not rank documents" in said["why"][0]
    assert kinds.status_of("rerank", until="serves")["why"] == []


def negated(checkpoint: bytes, name: str) -> bytes:
    """Return a file of safetensors with the other sign of a tensor of bfloat16."""
    size = 8 + int.from_bytes(checkpoint[:8], "little")
    first, end = (size + at for at in json.loads(checkpoint[8:size])[name]["data_offsets"])
    found = bytearray(checkpoint)
    for at in range(first + 1, end, 2):  # the sign is the highest bit, and these are little-endian
        found[at] ^= 0x80
    return bytes(found)


def test_a_vector_that_is_not_the_models_is_refused(kinds: KindsFleet) -> None:
    """What a server answers is compared with what the model's files on its node say."""
    node = NODES[0]
    unit = kinds.ssh(node, "ls /etc/systemd/system/ | grep 'vllm-embed.*service$'").split()[0]
    named = "sed -n 's/^RequiresMountsFor=//p' /etc/systemd/system/" + unit
    pooling = kinds.ssh(node, named).strip() + "/1_Pooling/config.json"
    right = kinds.ssh(node, f"cat {pooling}")
    wrong = right.replace(str(tiny_kinds.HIDDEN), "96")
    kinds.ssh(node, f"cat > {pooling}", stdin=wrong)
    try:
        status = kinds.gpufleet("status", kinds.inventory, "--completion", seconds=200)
    finally:
        kinds.ssh(node, f"cat > {pooling}", stdin=right)
    assert status.status != 0
    assert "an embedding fails" in status.output, status.output
    assert "128 numbers, and the model's files say 96" in " ".join(status.output.split())


def test_an_upgrade_of_an_embedder_compares_vectors_and_is_rolled_back(kinds: KindsFleet) -> None:
    """Meanwhile clients ask for everything through the gateway, and no request fails."""
    for deploy in ("deploys/gateway.py", "deploys/monitoring.py"):
        run = kinds.pyinfra("-y", deploy=deploy, seconds=900)
        assert run.status == 0, run.output
    first = kinds.ask("embed", "/v1/embeddings", input="Hello")
    with MixedLoad(kinds) as load:
        upgrade_and_back(kinds)
        load.wait(REQUESTS)
    assert load.failed == []
    print(f"{sum(load.sent.values())} requests, 0 failed: {dict(load.sent)}")
    last = kinds.ask("embed", "/v1/embeddings", input="Hello")
    for one, other in zip(first, last, strict=True):
        pair = one["data"][0]["embedding"], other["data"][0]["embedding"]
        assert sum(map(operator.mul, *pair)) >= 0.999


def upgrade_and_back(kinds: KindsFleet) -> None:
    """Change a flag of the embedder by an upgrade, and take it back by a rollback."""
    kinds.set_flag("embed", SEQUENCES, 4)
    done = kinds.upgrade()
    assert done.returncode == 0, done.stdout
    judged = [entry["said"] for entry in kinds.noted("judged")]
    golden = [said for said in judged if said["gate"] == "golden"]
    assert len(golden) == REPLICAS["embed"]
    assert all(said["passed"] for said in golden), golden
    assert seqs(kinds) == ["4"] * REPLICAS["embed"]

    process = kinds.begin("rollback")
    assert process.wait(timeout=1500) == 0, kinds.said()
    assert seqs(kinds) == [str(FLAGS[SEQUENCES])] * REPLICAS["embed"]


def answered(url: str, head: dict[str, str], put: questions.Question) -> Any:
    """Return the answer to a request of plain HTTP."""
    body = put.body if isinstance(put.body, bytes) else json.dumps(put.body).encode()
    kind = {"Content-Type": "application/json", **dict(put.headers)}
    with urllib.request.urlopen(urllib.request.Request(url + put.path, body, {**head, **kind}),
                                timeout=180) as answer:  # fmt: skip
        return json.load(answer)


class MixedLoad:
    """Clients that ask for every kind in turn, one request after the other."""

    def __init__(self, fleet: KindsFleet) -> None:
        self.sent: Counter[str] = Counter()
        self.failed: list[str] = []
        self._url = fleet.url.removesuffix("/v1")
        self._head = {"Authorization": f"Bearer {fleet.key_of_clients}"}
        self._asked = {
            **{kind: questions.question(kind, kind) for kind in REPLICAS},
            SPEECH: questions.question("transcribe", SPEECH),
            VISION: questions.question(questions.PICTURE, VISION),
            "text": questions.question("generate", VISION),
        }
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def wait(self, requests: int, seconds: float = 1800) -> None:
        """Wait until this many have been sent."""
        end = time.monotonic() + seconds
        while sum(self.sent.values()) < requests:
            assert time.monotonic() < end, self.sent
            time.sleep(1)

    def _ask(self) -> None:
        while not self._ended.is_set():
            for kind, put in self._asked.items():
                self.sent[kind] += 1
                try:
                    answered(self._url, self._head, put)
                except (OSError, ValueError) as error:
                    self.failed.append(f"{kind}: {error!r}")
                self._ended.wait(BETWEEN_SECONDS)


def seqs(fleet: KindsFleet) -> list[str]:
    """Return the flag's value in the units of the embedder."""
    find = f"grep -h -- --{SEQUENCES} /etc/systemd/system/vllm-embed-*.service; :"
    return [
        line.split()[1] for node in NODES for line in fleet.ssh(node, find).splitlines() if line
    ]
