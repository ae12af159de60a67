"""Assess nodes by their probes and variables: return the checks' findings, and the nodes' plan.

Deploys, live inventories and recordings use this module. The module does not import pyinfra. It
reads the date, and the lock files that settings name.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpufleet.artifacts import release
from gpufleet.checks.admission import admit, finding_sentence
from gpufleet.checks.evaluate import evaluate
from gpufleet.checks.finding import Report
from gpufleet.checks.probe_facts import Needs
from gpufleet.errors import FleetError
from gpufleet.fleet.fleet_plan import (
    Assessment,
    PlanInputs,
    further_problems,
    plan_known_nodes,
)
from gpufleet.fleet.model_configs import describe_models
from gpufleet.node import cordon
from gpufleet.node.machine import Machine, System, from_probe
from gpufleet.node.nic_affinity import nearest_nics
from gpufleet.node.topology import node_from_probe
from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.serving import vllm_node
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars


def machine_of(name: str, answer: Mapping[str, Any] | str) -> tuple[System, Machine] | None:
    """Return a node's system and machine from its probe, or None if they are unknown."""
    try:
        with refuse_malformed(name):
            return None if isinstance(answer, str) else from_probe(answer)
    except FleetError:
        return None


def check_nodes(
    answers: Mapping[str, Mapping[str, Any] | str],
    declared: Mapping[str, NodeVars],
    only: Collection[str] | None = None,
) -> Report:
    """
    Return the checks' findings on nodes. If `only` is set, return only the findings on these nodes.

    `answers` has, for each node, the document of its probe or a sentence why there is none.
    `answers` may have more nodes than `only`, which are used for comparison.

    Nodes in the same groups are compared with each other. Nodes that are not declared are checked
    with the default settings, and are compared with each other.
    """
    settings = {name: declared[name].settings for name in answers if name in declared}
    groups = {name: declared[name].groups if name in declared else () for name in answers}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, its_groups in groups.items():
        alike.setdefault(its_groups, []).append(name)
    return evaluate(
        answers,
        settings,
        dt.datetime.now(dt.UTC).date(),
        {name: _needs(settings[name]) for name in settings if only is None or name in only},
        {name: tuple(alike[its_groups]) for name, its_groups in groups.items()},
        only=only,
    )


def plan_fleet(
    answers: Mapping[str, Mapping[str, Any] | str],
    declared: Mapping[str, NodeVars],
    *,
    unfit_stops: bool = True,
    models_folder: Path | None = None,
    inventory: str = "INVENTORY",
) -> Assessment:
    """
    Return the plan for all nodes.

    Models in `models_folder` on this machine are read from there, not from the Hub. `inventory` is
    the inventory's file, for the commands in messages.

    Raises one `FleetError` with the nodes without an answer, all failed checks, the models that
    would not fit even without these failures, and the settings that vLLM would refuse.
    `unfit_stops=False` is for showing the running stages: failed checks are only remarks, and flags
    are not checked.
    """
    if not unfit_stops:
        require_documents(answers)
    documents = {name: said for name, said in answers.items() if not isinstance(said, str)}
    report = check_nodes(documents, declared)
    nodes, nics = {}, {}
    for name, document in documents.items():
        with refuse_malformed(name):
            nodes[name], nics[name] = node_from_probe(name, document), nearest_nics(document)
    models = describe_models(declared, documents, models_folder)
    there = PlanInputs(
        documents,
        {name: each.settings for name, each in declared.items()},
        {name: each.origins for name, each in declared.items()},
        nodes,
        nics,
        {name: each.described for name, each in models.items()},
        {name: each.groups for name, each in declared.items()},
        {name: each.kind for name, each in models.items()},
    )
    unknown = tuple(
        f"{name}: it is not known whether the node is cordoned ({why}), so the plan assumes "
        "that it is not cordoned"
        for name, document in documents.items()
        if (why := cordon.unknown_reason(document))
    )
    if not unfit_stops:
        unfit = (each for each in report.findings if each.stops and each.cause is None)
        found = plan_known_nodes(there, judged=False)
        return replace(found, remarks=(*unknown, *map(finding_sentence, unfit)))
    admission = admit(report, nodes.values(), there.settings)
    there = replace(there, nodes=admission.nodes)
    unserved = (
        *_missing_documents(answers),
        *vllm_node.system_problems(documents, there.settings),
        *(each.replace("INVENTORY", inventory) for each in admission.problems),
    )
    if unserved:
        hidden = admission.hidden | (answers.keys() - documents.keys())
        raise FleetError(*unserved, *further_problems(there, hidden))
    found = plan_known_nodes(there)
    return replace(found, remarks=(*unknown, *found.remarks))


def require_documents(
    answers: Mapping[str, Mapping[str, Any] | str],
) -> dict[str, Mapping[str, Any]]:
    """
    Return the documents of all nodes.

    Raises `FleetError` with every node that gave no answer, because a plan without these nodes
    would move their replicas.
    """
    if missing := _missing_documents(answers):
        raise FleetError(*missing)
    return {name: said for name, said in answers.items() if not isinstance(said, str)}


def _missing_documents(answers: Mapping[str, Mapping[str, Any] | str]) -> list[str]:
    missing = [f"{name}: {said}" for name, said in answers.items() if isinstance(said, str)]
    if missing:
        missing.append(
            "a plan needs an answer from every node of the inventory: repair these nodes, "
            "or remove them from the inventory. If you remove them, their replicas move to "
            "the other nodes; a replica that spans nodes moves only with "
            "`when_a_node_leaves: replan`"
        )
    return missing


def _needs(settings: NodeSettings) -> Needs:
    """Return a node's requirements from the releases that its settings name.

    If there are several releases, the release with the newest CUDA runtime counts.
    """
    found = [Needs()]
    for each in settings.used_engines:
        if each.device != "cuda":
            continue
        try:
            lock = Path(each.lock).read_bytes()
        except OSError:
            continue  # the role that installs the release says what is wrong with its lock
        source = f"the CUDA runtime in {each.lock}"
        found.append(Needs(release.cuda_release(lock), source, each.engine))
    return max(found, key=lambda needs: (needs.cuda or (0, 0), needs.source != ""))
