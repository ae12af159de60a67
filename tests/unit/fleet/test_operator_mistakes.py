"""What operators get wrong in settings of the right form is said before a node is touched."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.checks.finding import Severity
from gpufleet.errors import FleetError
from gpufleet.fleet import assessment
from gpufleet.inventory import loader
from gpufleet.serving import vllm_node
from gpufleet.settings.parse import SettingsError, parse_settings
from tests.support.hostile import PAGE
from tests.support.measured import note
from tests.support.sound_node import sound_node
from tests.unit.fleet.mistakes import MISTAKES, PROJECTS, VLLM, flags, pair, served, variables, vllm
from tests.unit.fleet.more_mistakes import MORE


@pytest.fixture(scope="module")
def node() -> dict[str, Any]:
    """Eight sound H100 with a driver for the release, and a 32 B model at /srv/q and /srv/r."""
    return sound_node("/srv/q", "/srv/r")


EVERY = {**MISTAKES, **MORE}

UNSAID = frozenset(
    {
        # Models that chat are served as embedders on purpose, too.
        "embeddings of a chat model",
        # Clients have to send such a name, and can.
        "served name slash",
        # Programs of others may read it.
        "env TP",
        # It starts, and is slow.
        "flag batch below context no",
        # vLLM takes limits of items that a model has not.
        "flag mm for text model",
        "flag lang only text model",
        # A model's own code may read any key.
        "flag hf overrides key",
        "flag spec many",
        # vLLM starts with it.
        "flag kv offload size negative",
        # Read with the first request, or by an exporter of traces.
        "flag override gen",
        "flag otlp",
    }
)
"""Those of which nothing is said."""


def said(document: dict[str, Any], written: dict[str, Any], key: Path) -> list[str]:
    """Return what a deploy would say of settings before it touches a node: [] is nothing."""
    everything = {"vllm": VLLM, **copy.deepcopy(written)}
    if everything["vllm"] and everything["vllm"]["api_key_file"] == VLLM["api_key_file"]:
        everything["vllm"] = {**everything["vllm"], "api_key_file": str(key)}
    try:
        settings = parse_settings(everything)
        if problems := vllm_node.file_problems(settings):
            return [*problems]
        declared: Any = {"a": SimpleNamespace(groups=(), settings=settings, origins={})}
        report = assessment.check_nodes({"a": document}, declared)
        found = assessment.plan_fleet({"a": document}, declared)
    except SettingsError as error:
        return [str(error)]
    except FleetError as error:
        return [*error.problems]
    worth = [each.found for each in report.findings if each.severity is Severity.WARN]
    return [*worth, *found.remarks]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("k" * 64 + "\n")
    return tmp_path / "key"


def test_nothing_is_said_of_settings_that_are_right(node: dict[str, Any], key: Path) -> None:
    for right in (
        served(),
        served(tensor_parallel=2),
        served(replicas=8),
        pair({}, {"port": 8100}),
        variables(NCCL_IB_HCA="mlx5", NCCL_DEBUG="info", OMP_NUM_THREADS="8"),
        variables(VLLM_LOGGING_LEVEL="debug"),
        flags(tokenizer_mode="mistral", block_size=32, cpu_offload_gb=10),
        vllm(index_url="https://pypi.internal/simple"),
    ):
        assert said(node, right, key) == []


def test_an_operators_mistake_is_said(node: dict[str, Any], key: Path) -> None:
    silent = {name for name, written in EVERY.items() if not said(node, written, key)}
    assert silent == UNSAID


def project(folder: Path, files: dict[str, str]) -> list[str]:
    """Return what is said when the inventory of a project is read."""
    arguments = files.get("inventory", 'groups={"gpu_h100": ["gpu-01"]}')
    text = (
        f"from gpufleet import inventory\nglobals().update(inventory.load(__file__, {arguments}))\n"
    )
    for name, content in {**files, "inventories/prod.py": text}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    try:
        return [*loader.read(folder / "inventories/prod.py").remarks]
    except FleetError as error:
        return [*error.problems]


def test_a_mistake_in_a_projects_files_is_said(tmp_path: Path) -> None:
    assert project(tmp_path / "right", {"group_vars/gpu_h100.yml": "gpus: {count: 8}"}) == []
    silent = {
        name
        for number, (name, files) in enumerate(PROJECTS.items())
        if not project(tmp_path / str(number), files)
    }
    assert silent == set()


def test_at_least_95_of_100_mistakes_are_said(request: pytest.FixtureRequest) -> None:
    """The last test of the file: where none has failed, what is said is as `UNSAID` has it."""
    every = len(EVERY) + len(PROJECTS)
    assert every >= 240
    assert len(UNSAID) <= every * 0.05
    left = f"{every - len(UNSAID)} pointed out; not: {', '.join(sorted(UNSAID))}"
    what = "operators' mistakes in settings of the right form"
    if not request.session.testsfailed:
        note(PAGE, what, "`unit/fleet/test_operator_mistakes.py`", str(every), left)
