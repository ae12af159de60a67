"""What every test of the checks does: take a recorded node, break it, judge it."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from gpufleet.checks.evaluate import evaluate
from gpufleet.checks.finding import Finding, Report, Severity
from gpufleet.checks.probe_facts import Needs
from gpufleet.settings.parse import parse_settings
from tests.support.checkout import ROOT

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
PROFILES = sorted(path.stem for path in NODES.glob("*.json"))
NODE = "gpu-01"
TODAY = dt.date(2026, 1, 1)


def about(found: Finding) -> int | str | None:
    """Return which GPU a finding is about: NVML's index, else what people call it."""
    if found.gpu is None:
        return None
    return found.gpu.name if found.gpu.index is None else found.gpu.index


@dataclass(frozen=True)
class Judged:
    """What the checks said of the one node that a test is about."""

    report: Report

    @property
    def findings(self) -> list[Finding]:
        """Everything said of it, the passed checks too."""
        return [finding for finding in self.report.findings if finding.node == NODE]

    @property
    def troubles(self) -> set[tuple[str, str, int | str | None]]:
        """(check, severity, GPU or None) of everything worse than info: {("ecc-mode", "warn", 3)}.

        A GPU that NVML does not list is named by its PCI address, or "that is gone".

        Comparing it with the one expected trouble also says that no other check is alarmed.
        """
        return {
            (found.check, found.severity.word, about(found))
            for found in self.findings
            if found.severity > Severity.INFO
        }

    def of(self, check: str, gpu: int | None = None) -> list[Finding]:
        """Return what a check said, the worst first; of one GPU, or of whatever it is about."""
        said = [
            found
            for found in self.findings
            if found.check == check and (gpu is None or (found.gpu and found.gpu.index == gpu))
        ]
        return sorted(said, key=lambda found: -found.severity)

    def worst(self, check: str, gpu: int | None = None) -> Finding:
        """Return the worst that a check said."""
        return self.of(check, gpu)[0]

    def text(self, check: str, gpu: int | None = None) -> str:
        """Return everything that an operator reads of a check's worst finding, in one string."""
        worst = self.worst(check, gpu)
        return "\n".join(
            [worst.found, worst.expected, worst.source, *(step.text for step in worst.remedy)]
        )


def of_node(number: int, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a recorded document as that of another machine: UUIDs that no other one has."""
    gpus = [
        {**gpu, "uuid": gpu["uuid"].replace("GPU-", f"GPU-{number:x}")}
        if isinstance(gpu.get("uuid"), str) else gpu
        for gpu in document["gpus"]
    ]  # fmt: skip
    return {**document, "gpus": gpus}


@pytest.fixture
def document() -> Callable[[str], Any]:
    """`document("h100x8")`: what the probe prints on that healthy profile, free to be changed."""

    def recorded(profile: str) -> Any:
        return json.loads((NODES / f"{profile}.json").read_text())

    return recorded


@pytest.fixture
def judged() -> Callable[..., Judged]:
    """
    `judged(document)`: what the checks say of a node of which the probe printed that.

    `settings` is what its variables say ({"gpus": {"count": 8}}), `needs` what vLLM asks,
    `siblings` the documents of nodes that should be alike, which get GPUs of their own.
    """

    def by_all_checks(
        found: Mapping[str, Any] | str,
        settings: Mapping[str, Any] | None = None,
        needs: Needs | None = None,
        siblings: Iterable[Mapping[str, Any]] = (),
        today: dt.date = TODAY,
    ) -> Judged:
        others = {
            f"gpu-{number:02}": of_node(number, other) for number, other in enumerate(siblings, 2)
        }
        documents: dict[str, Mapping[str, Any] | str] = {NODE: found, **others}
        return Judged(
            evaluate(
                documents,
                {NODE: parse_settings(settings or {})},
                today,
                {NODE: needs or Needs()},
            )
        )

    return by_all_checks
