"""Three models share one GPU of a node: a chat model, an embedder, a reranker, on vLLM's CPU build.

That their starts do not overlap is read from the journals of their units, and that a server
answers from its port. Tests run in the order in which they stand: each takes the node as the one
before left it.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from gpufleet.on_node.serving import questions
from lab import fake_hub, package_mirror, tiny_kinds
from tests.lab.upgrade_fleet import FLAGS, NEW, UpgradeFleet, upgrade_fleet
from tests.support.checkout import own_lab

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

NODE = "gpu-01"
CHAT = "tiny"
SHARES = {CHAT: 0.5, "embed": 0.2, "rerank": 0.1}
KINDS: tuple[tiny_kinds.Kind, ...] = ("embed", "rerank")
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT: ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
    "embed": ("/v1/embeddings", {"input": "Hello"}),
    "rerank": (
        "/rerank",
        {"query": questions.QUERY, "documents": [*questions.DOCUMENTS]},
    ),
}
PATIENCE = 900
"""Seconds for three starts on a busy machine."""
STARTS = "gpufleet: starts"
ANSWERS = "gpufleet: answers"
JOURNAL_SECONDS = 1.0
"""How late the journal may note a line: it reads those of two units in no order. A start takes far
longer."""


@dataclass
class SharedGpu(UpgradeFleet):
    """One node with one GPU that is not reserved."""

    first: str = NEW

    def lay_out(self) -> None:
        super().lay_out()
        tiny = self.wanted["serving"][CHAT]
        tiny |= {"gpu_share": SHARES[CHAT], "replicas": 1}
        hub = self.state.dir / package_mirror.MODELS
        for kind in KINDS:
            name = f"lab/tiny-{kind}"
            revision = fake_hub.revision_of(tiny_kinds.write(hub / name, kind))
            flags = {**FLAGS, "max-model-len": 256}
            own = {"model": name, "revision": revision, "gpu_share": SHARES[kind], "flags": flags}
            self.wanted["serving"][kind] = {**tiny, **own}
        self.declare()

    def units(self) -> dict[str, str]:
        """Return the text of each unit of a server, by model."""
        return {
            model: self.ssh(NODE, f"cat /etc/systemd/system/vllm-{model}-0.service 2>/dev/null; :")
            for model in SHARES
        }

    def answers(self, model: str) -> bool:
        """Return whether a model answers what it is for, at the port that its unit names."""
        lines = self.units()[model].splitlines()
        port = next(line.removeprefix("Port=") for line in lines if line.startswith("Port="))
        path, body = QUESTIONS[model]
        request = urllib.request.Request(
            f"http://{self.address(NODE)}:{port}{path}",
            json.dumps({"model": model, **body}).encode(),
            {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bool(json.load(answer))
        except urllib.error.HTTPError:
            raise
        except OSError:
            return False

    def until_all_answer(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not all(self.answers(model) for model in SHARES):
            assert time.monotonic() < deadline, self.said_by_units()
            time.sleep(2)

    def said_by_units(self) -> str:
        return self.ssh(NODE, "journalctl -u 'vllm-*' -o short-unix --no-pager | tail -n 80")

    def now(self) -> float:
        """Return the node's time."""
        return float(self.ssh(NODE, "date +%s.%N"))

    def starts(self, since: float) -> list[tuple[float, float, str]]:
        """Return when each start since then began to load and had answered, by the journals."""
        found = []
        for model in SHARES:
            lines = self.ssh(
                NODE,
                f"journalctl -u vllm-{model}-0 -o short-unix --no-pager --since=@{since:.0f} "
                f"| grep -e '{STARTS}' -e '{ANSWERS}'; :",
            ).splitlines()
            times = [(float(line.split()[0]), STARTS in line) for line in lines]
            begun = 0.0
            for at, starts in times:
                if starts:
                    begun = at
                elif begun:
                    found.append((begun, at, model))
        return sorted(found)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedGpu]:
    project = tmp_path_factory.mktemp("shared")
    with upgrade_fleet(own_lab("gfsg"), project, (NODE,), also=(), kind=SharedGpu) as found:
        yield found


def one_after_the_other(starts: list[tuple[float, float, str]]) -> None:
    """Assert that all have started, and that none began before the one ahead of it answered."""
    assert sorted(model for _, _, model in starts) == sorted(SHARES)
    for (_, answered, first), (begun, _, second) in pairwise(starts):
        assert answered <= begun + JOURNAL_SECONDS, (
            f"{second} began before {first} answered: {starts}"
        )


def test_a_deploy_ends_when_all_three_answer_and_they_started_in_turn(gpu: SharedGpu) -> None:
    since = gpu.now()
    run = gpu.pyinfra("-y", seconds=2400)
    assert run.status == 0, run.output

    assert all(gpu.answers(model) for model in SHARES)
    one_after_the_other(gpu.starts(since))


def test_their_units_have_one_gpu_and_a_budget_within_their_share(gpu: SharedGpu) -> None:
    units = gpu.units()

    assert len({line for unit in units.values() for line in unit.splitlines()
                if line.startswith("Gpus=")}) == 1  # fmt: skip
    for model, unit in units.items():
        [budget] = [line.split()[1] for line in unit.splitlines() if "--gpu-memory-util" in line]
        assert 0 < float(budget) < SHARES[model]


def test_a_second_run_changes_nothing(gpu: SharedGpu) -> None:
    before = gpu.pids()
    run = gpu.pyinfra("-y", "--json", seconds=900)
    assert run.status == 0, run.output
    assert run.changed == {}
    assert gpu.pids() == before
    assert len(before) == len(SHARES)


def test_the_plan_says_what_is_on_the_gpu_and_status_that_all_serve(gpu: SharedGpu) -> None:
    said = gpu.gpufleet("plan", gpu.inventory, "--explain", seconds=200)
    assert said.status == 0, said.output
    share = r"{}-0 {} port \d+, "
    line = "".join(share.format(model, part) for model, part in SHARES.items()) + "free 0.15"
    assert re.search(line, " ".join(said.stdout.split())), said.stdout
    status = gpu.gpufleet("status", gpu.inventory, "--completion", "--json", seconds=200)
    assert status.status == 0, status.output
    assert {each["state"] for each in json.loads(status.stdout)["replicas"]} == {"serves"}


def test_servers_that_were_all_killed_come_back_one_after_the_other(gpu: SharedGpu) -> None:
    since = gpu.now()
    gpu.ssh(NODE, "systemctl kill --signal=KILL 'vllm-*.service'")
    gpu.until_all_answer()

    one_after_the_other(gpu.starts(since))


def test_after_a_boot_they_come_back_one_after_the_other(gpu: SharedGpu) -> None:
    since = gpu.now()
    gpu.lab.power(NODE, "cycle")
    gpu.until_all_answer()

    one_after_the_other(gpu.starts(since))


def test_one_that_is_taken_out_leaves_the_others_as_they_run(gpu: SharedGpu) -> None:
    before = gpu.pids()
    gpu.wanted["serving"].pop("embed")
    gpu.declare()
    run = gpu.pyinfra("-y", seconds=900)
    assert run.status == 0, run.output

    left = {f"{NODE} vllm-{model}-0.service" for model in SHARES if model != "embed"}
    assert gpu.pids() == {unit: before[unit] for unit in left}
    assert gpu.answers(CHAT)
    assert gpu.answers("rerank")
