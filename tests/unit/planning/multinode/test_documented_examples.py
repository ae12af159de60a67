"""
The examples of docs/plan/multi-node-examples*.md are what plans of recorded machines start.

`UPDATE_GOLDEN=1 pytest tests/unit/planning/multinode/test_documented_examples.py` writes them
there, for you to review.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from gpufleet.engines.vllm import launch_environment
from gpufleet.engines.vllm.launch_arguments import lines
from gpufleet.flags import schema
from gpufleet.flags.check import check
from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.fleet.run import NodePlan
from gpufleet.on_node.rank import rank
from gpufleet.planning.multinode import launch
from gpufleet.planning.stage import Stage
from gpufleet.serving.unit import UnitFile, render_unit
from gpufleet.serving.vllm_node import endpoints
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import OLDEST_VLLM, Vllm
from tests.support.checkout import ROOT
from tests.support.planned import machine, planned
from tests.support.rows import each_row

PAGES = sorted((ROOT / "docs/plan").glob("multi-node-examples*.md"))
SUPPORTED = [one for one in schema.versions() if schema.sort_key(one) >= OLDEST_VLLM]
RELEASE = "0.33.0-1f2e3d4c5b"
LOCK = str(ROOT / "tests/data/examples-lock.txt")
# It has the programs' own content in it, which the page would change with.
FINGERPRINT = re.compile(r"(--same fingerprint=)[0-9a-f]{16}")


@dataclass(frozen=True)
class Example:
    """Recorded machines, and what is served on them."""

    profile: str
    nodes: int
    model: str
    serving: dict[str, dict[str, Any]]


LLAMA = "meta-llama--Meta-Llama-3.1-405B"
DEEPSEEK = "deepseek-ai--DeepSeek-V3"
SPREAD = {"model": "/srv/models/m", "span_nodes": True}
PIPELINE = SPREAD | {"tensor_parallel": 8, "pipeline_parallel": 2, "context": 32768}
EXPERTS = SPREAD | {"tensor_parallel": 1, "expert_parallel": True}
BALANCED = {
    "all2all-backend": "deepep_low_latency",
    "enable-eplb": True,
    "eplb-config": {"num_redundant_experts": 32},
}
EXAMPLES = {
    "Two nodes of eight H100, native": Example("h100x8", 2, LLAMA, {"llama-405b": PIPELINE}),
    "Two nodes of eight H100, Ray": Example(
        "h100x8", 2, LLAMA, {"llama-405b": PIPELINE | {"distributed_executor_backend": "ray"}}
    ),
    "Four nodes of eight H200, one server per node": Example(
        "h200x8",
        4,
        DEEPSEEK,
        {
            "deepseek": EXPERTS
            | {"data_parallel": 32, "data_parallel_balancing": "hybrid", "flags": BALANCED}
        },
    ),
    "Four nodes of eight H200, one server": Example(
        "h200x8", 4, DEEPSEEK, {"deepseek": EXPERTS | {"data_parallel": 32, "flags": BALANCED}}
    ),
    "Four nodes of eight H200, one server per engine": Example(
        "h200x8",
        4,
        DEEPSEEK,
        {
            "deepseek": EXPERTS
            | {"data_parallel": 32, "data_parallel_balancing": "external", "flags": BALANCED}
        },
    ),
    "An NVL72 rack": Example(
        "gb200x4",
        18,
        DEEPSEEK,
        {
            "deepseek": EXPERTS
            | {
                "data_parallel": 72,
                "data_parallel_balancing": "hybrid",
                "flags": BALANCED
                | {
                    "all2all-backend": "flashinfer_nvlink_two_sided",
                    "max-num-batched-tokens": 1024,
                },
            }
        },
    ),
    "Prefill and decode, two nodes each": Example(
        "h200x8",
        4,
        DEEPSEEK,
        {
            "deepseek": EXPERTS
            | {
                "prefill": "deepseek-prompts",
                "data_parallel": 16,
                "flags": {"all2all-backend": "deepep_low_latency"},
            },
            "deepseek-prompts": EXPERTS
            | {
                "served_name": "deepseek",
                "data_parallel": 16,
                "flags": {"all2all-backend": "deepep_high_throughput"},
            },
        },
    ),
}


def settings(example: Example) -> dict[str, Any]:
    return {
        "vllm": {
            "version": "0.33.0",
            "lock": LOCK,
            "api_key_file": "secrets/api-key",
            "cluster_key_file": "secrets/cluster-key",
        },
        "serving": example.serving,
    }


@cache
def plan(name: str) -> Assessment:
    example = EXAMPLES[name]
    models = {"/srv/models/m": example.model}
    machines = {
        f"gpu-{number:02}": machine(example.profile, number, models)
        for number in range(1, example.nodes + 1)
    }
    return planned(machines, dict.fromkeys(machines, settings(example)))


def ends(name: str) -> list[Stage]:
    """The first and the last stage of each replica; those between differ by numbers alone."""
    by_replica: dict[str, list[Stage]] = {}
    for stage in plan(name).plan.stages:
        by_replica.setdefault(stage.id, []).append(stage)
    return [stage for replica in by_replica.values() for stage in (replica[0], replica[-1])]


def unit(name: str, stage: Stage) -> str:
    here = NodeSettings.model_validate(settings(EXAMPLES[name]))
    assert here.vllm
    model = here.serving[stage.model]
    secrets = dict.fromkeys(("api-key", "cluster-key", "ray-token"), "7d" * 32)
    return render_unit(stage, model, here.vllm, release=RELEASE, credentials=secrets).content


def shown(name: str, stage: Stage) -> str:
    """What the page shows of a unit: what ranks have beside any stage, and what is started."""
    here = NodeSettings.model_validate(settings(EXAMPLES[name]))
    assert here.vllm
    model = here.serving[stage.model]
    own = dict(launch_environment.rank(stage, model, here.vllm).variables)
    if stage.handover:
        network = dict(stage.handover.networks)[stage.node]
        own |= launch.transfer_variables(stage, model, network, port=stage.handover.port)
    text = unit(name, stage)
    variables = [
        line
        for line in text.splitlines()
        if line.startswith("Environment=") and line.split("=")[1].strip("'\"") in own
    ]
    command = re.search(r"^ExecStart=.*?[^\\]$", text, re.MULTILINE | re.DOTALL)
    assert command
    return "\n".join(
        [
            f"# {stage.node}: {stage.unit}",
            *variables,
            FINGERPRINT.sub(r"\g<1>4be2a98c61d05f37", command[0]),
        ]
    )


def block(name: str) -> str:
    return "\n\n".join(shown(name, stage) for stage in ends(name))


@each_row("name", EXAMPLES)
def test_an_example_is_planned_over_all_its_nodes(name):
    stages = plan(name).plan.stages

    assert len({stage.node for stage in stages}) == EXAMPLES[name].nodes
    assert all(stage.group for stage in stages)
    assert plan(name).remarks == ()


@each_row("version", SUPPORTED)
@each_row("name", EXAMPLES)
def test_every_release_takes_what_an_example_starts(name, version):
    """Word by word as the ranks' program would start it, in that release's own parser."""
    if "one server per engine" in name and schema.sort_key(version) < (0, 22):
        return  # refused with a sentence: tests/unit/planning/multinode/test_launch.py
    here = NodeSettings.model_validate(settings(EXAMPLES[name]))
    assert here.vllm
    vllm = Vllm.model_validate(here.vllm.model_dump() | {"version": version})
    for stage in ends(name):
        model = here.serving[stage.model]
        if not launch_environment.rank(stage, model, vllm).serves:
            continue
        assert stage.group
        words = [
            word
            for line in launch.command(
                stage,
                model,
                launch_environment.rank(stage, model, vllm),
                dict(stage.group.networks),
                port=stage.group.cluster_port,
                same={},
                programs="/opt/vllm/bin",
                server=("/opt/vllm/bin/vllm", "serve"),
                serve=[line for _, line in lines(stage, model, vllm)],
            )
            for word in line
        ]
        _, programs = rank.arguments(words)
        serving = [launch.fill_ports(word, stage.group.cluster_port) for word in programs[-1]]
        environment = launch_environment.environment(stage, model, vllm, release=RELEASE)
        problems = check(schema.load(version), serving[serving.index("serve") + 1 :], environment)

        assert [str(each) for each in problems if each.refuses] == []


def test_a_deploy_waits_for_every_server_of_a_node():
    name = "Four nodes of eight H200, one server per engine"
    found = plan(name)
    here = NodePlan(
        node=found.nodes["gpu-02"],
        settings=NodeSettings.model_validate(settings(EXAMPLES[name])),
        stages=found.plan.stages_on("gpu-02"),
    )
    rendered = {stage: UnitFile(stage.unit, "", "", fingerprint="4be2") for stage in here.stages}

    waits = endpoints(rendered, here.settings)

    assert [each.url for each in waits] == [
        f"http://127.0.0.1:{port}" for port in range(8000, 8008)
    ]
    assert len({each.id for each in waits}) == 8
    assert {each.unit for each in waits} == {"vllm-deepseek-0.service"}


def test_the_pages_show_what_is_started():
    found = {}
    for path in PAGES:
        page = path.read_text()
        blocks = dict(
            re.findall(r"^## (.+?)\n(?:(?!^#).)*?^```\n(.*?)\n```", page, re.MULTILINE | re.DOTALL)
        )
        if os.environ.get("UPDATE_GOLDEN"):
            for name, old in blocks.items():
                page = page.replace(f"```\n{old}\n```", f"```\n{block(name)}\n```", 1)
            path.write_text(page)
            blocks = {name: block(name) for name in blocks}
        found |= blocks

    assert found == {name: block(name) for name in EXAMPLES}
