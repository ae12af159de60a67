"""One replica over two nodes, by the main deploy, with only group_vars changed; real vLLM on CPU.

The nodes have one GPU each that is not reserved, so that a pipeline of two stages spans both.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import yaml

from lab import supplies
from lab.nodes import Lab
from lab.state import LabState
from tests.lab.conftest import ROOT, Fleet

LAB_ID = "gfr"
# CPU's eager mode skips the warm-up that a pipeline needs (measured with 0.32.0).
PIPELINE = {"mode": 2, "backend": "eager"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    lab = Lab.open(LAB_ID, print)
    lab.purge()  # what a killed run left
    lab.up({"gpu-01": "h100x8", "gpu-02": "h100x8"})
    supplies.provide(LabState.load(LAB_ID), print)
    project = tmp_path_factory.mktemp("pair")
    for folder in ("inventories", "group_vars", "host_vars"):
        shutil.copytree(ROOT / folder, project / folder)
    yield Fleet(Lab.open(LAB_ID, print), project)
    lab.purge()


def declare(fleet: Fleet, **tiny: Any) -> None:
    """Have the model span nodes: one free GPU on each."""
    path = fleet.project / "group_vars/lab.yml"
    data = yaml.safe_load(path.read_text())
    data["gpus"] = {"reserved": list(range(1, 8))}
    own = data["serving"]["tiny"]
    flags = {key: value for key, value in own["flags"].items() if key != "enforce-eager"}
    own |= {"replicas": 1, "span_nodes": True, "flags": flags, **tiny}
    path.write_text(yaml.safe_dump(data))


def completion(fleet: Fleet) -> str:
    client = openai.OpenAI(
        base_url=f"http://{fleet.address('gpu-01')}:8000/v1", api_key=fleet.key, timeout=60
    )
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=8, temperature=0)
    return answer.choices[0].text


def test_a_pipeline_over_two_nodes_answers_as_one_node_does(pair: Fleet) -> None:
    declare(pair, tensor_parallel=1, pipeline_parallel=2)
    data = yaml.safe_load((pair.project / "group_vars/lab.yml").read_text())
    data["serving"]["tiny"]["flags"]["compilation-config"] = PIPELINE
    (pair.project / "group_vars/lab.yml").write_text(yaml.safe_dump(data))

    run = pair.pyinfra("-y", seconds=1800)
    assert run.status == 0, run.output
    assert set(pair.pids()) == {"gpu-01 vllm-tiny-0.service", "gpu-02 vllm-tiny-0.service"}
    spanning = completion(pair)

    before = pair.pids()
    again = pair.pyinfra("-y", "--json")
    assert again.status == 0, again.output
    assert again.changed == {}
    assert pair.pids() == before

    pair.reset()
    run = pair.pyinfra("-y", seconds=1800)
    assert run.status == 0, run.output
    assert completion(pair) == spanning
