"""
Check an inventory without connecting to its nodes.

`gpufleet validate` uses this module, and each deploy uses it first.

`inventory/loader.py` checks the settings themselves. This module checks the files that settings
name, certificates, the models' code, flags, and the requirements of a gateway and LiteLLM. If the
hardware of the nodes is named, this module also checks the plan. Border: it reads files of this
machine, and a plan may query the Hub.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpufleet.artifacts import release
from gpufleet.artifacts.model_lock import judge_models
from gpufleet.artifacts.operator_files import read
from gpufleet.errors import FleetError
from gpufleet.fleet.assessment import plan_fleet
from gpufleet.fleet.declared_hardware import hardware_documents
from gpufleet.inventory.loader import Fleet
from gpufleet.monitoring import exporters
from gpufleet.network import gateway_node, haproxy, keepalived, litellm, litellm_node
from gpufleet.planning.gpu_totals import Totals
from gpufleet.planning.kind_flags import kind_problems
from gpufleet.serving import vllm_node
from gpufleet.serving.declared_flags import declared_problems
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.operator_paths import NamedFile, named_files


@dataclass(frozen=True)
class Validation:
    """
    The result of a validation: sentences, and the totals of the plan, if there is a plan.

    `problems` stop a deploy. `remarks` do not stop a deploy.
    """

    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    totals: Totals | None = None

    def __add__(self, other: Validation) -> Validation:
        return Validation(
            tuple(dict.fromkeys((*self.problems, *other.problems))),
            tuple(dict.fromkeys((*self.remarks, *other.remarks))),
            other.totals or self.totals,
        )

    def as_json(self) -> dict[str, Any]:
        """
        Return plain values for `json.dumps`.

            {"problems": ["group_vars/prod.yml:30: ..."], "remarks": [], "totals": {"gpus": 112}}
        """
        return {
            "problems": list(self.problems),
            "remarks": list(self.remarks),
            "totals": asdict(self.totals) if self.totals else None,
        }


def validate(
    fleet: Fleet,
    *,
    hardware: Mapping[str, str] | None = None,
    models_folder: Path | None = None,
    secret_files: bool = True,
    only: Collection[str] | None = None,
) -> Validation:
    """
    Return the problems of an inventory that can be found without its nodes.

    `hardware` maps groups or nodes to names of hardware. If `hardware` is set, or if every GPU node
    has `gpus.hardware`, gpufleet also plans the fleet on this hardware. `secret_files=False` is for
    machines that have none of the secrets. `only` names the nodes whose files and certificates are
    checked; None means all nodes.
    """
    now = dt.datetime.now(dt.UTC)
    found = Validation(remarks=fleet.remarks)
    nodes = {name: node for name, node in fleet.nodes.items() if only is None or name in only}
    for node in nodes.values():
        files = _files([node], secret_files=secret_files)
        found += files
        if files.problems:  # do not report missing files twice
            continue
        found += _programs(node, fleet.nodes, now, secret_files=secret_files)
        found += Validation(vllm_node.file_problems(node.settings, secrets=secret_files))
    found += _run_check(lambda: judge_models({n: v.settings for n, v in fleet.nodes.items()}))
    gpus = fleet.gpu_nodes
    serving = [node for node in gpus.values() if node.settings.serving]
    if hardware or (serving and all(node.settings.gpus.hardware for node in gpus.values())):
        return found + _plan(gpus, hardware or {}, models_folder)
    settings = {name: node.settings for name, node in gpus.items()}
    origins = {name: node.origins for name, node in gpus.items()}
    return found + Validation((*declared_problems(settings, origins), *kind_problems(settings)))


def require_valid(fleet: Fleet, only: Collection[str] | None = None) -> tuple[str, ...]:
    """Return the remarks of `validate`. Raises `FleetError` with every problem."""
    found = validate(fleet, only=only)
    if found.problems:
        raise FleetError(*found.problems)
    return found.remarks


def _run_check(work: Callable[[], tuple[str, ...]]) -> Validation:
    """Run `work`. Return its remarks, or the problems that it raises."""
    try:
        return Validation(remarks=work())
    except FleetError as error:
        return Validation(problems=error.problems)


# Files


def _files(nodes: Iterable[NodeVars], *, secret_files: bool) -> Validation:
    """Return a problem for each file named in settings that is unreadable or empty."""
    problems: dict[str, None] = {}
    for node in nodes:
        for named in named_files(node.settings, node.name):
            if named.secret and not secret_files:
                continue
            if why := _file_problem(named):
                problems[f"{_place(node, named)}: {why}"] = None
    return Validation(tuple(problems))


def _file_problem(named: NamedFile) -> str:
    try:
        content = Path(named.path).expanduser().read_bytes()
    except OSError as error:
        return f"{named.path} cannot be read ({error.strerror})" + (
            ": write the secret to this file, and run `chmod 600` on it" if named.secret else ""
        )
    return "" if content.strip() else f"{named.path} is empty"


def _place(node: NodeVars, named: NamedFile) -> str:
    key = ".".join(map(str, named.at))
    origin = node.origins.get(str(named.at[0]))
    return f"{origin.place_of(*named.at[1:])}: {key}" if origin else f"{node.name}: {key}"


# Programs


def _programs(
    node: NodeVars, nodes: Mapping[str, NodeVars], now: dt.datetime, *, secret_files: bool
) -> Validation:
    """Return problems of certificates and of the configuration of gateways and LiteLLM."""
    found = Validation()
    settings, name = node.settings, node.name
    if settings.exporters.tls and secret_files:
        # Without the password: its hash takes time.
        tls = settings.exporters.model_copy(update={"basic_auth": None})
        found += _run_check(lambda: exporters.access(tls, name, node.address, now=now).remarks)
    if gateway := settings.gateway:
        found += Validation((*haproxy.problems(nodes, name), *keepalived.problems(nodes, name)))
        if secret_files:
            found += _run_check(lambda: gateway_node.certificate_remarks(gateway, name, now))
    if wanted := settings.litellm:
        found += Validation(tuple(litellm.problems(wanted, nodes, name)))

        def files() -> tuple[str, ...]:
            release.release(wanted, read(wanted.lock), read(wanted.uv_lock), litellm.PROGRAM)
            if secret_files:
                litellm_node.read_files(wanted, nodes, name)
            return ()

        found += _run_check(files)
    return found


# Models


def _plan(
    nodes: Mapping[str, NodeVars], hardware: Mapping[str, str], models_folder: Path | None
) -> Validation:
    try:
        documents = hardware_documents(nodes, hardware)
        found = plan_fleet(documents, nodes, models_folder=models_folder)
    except FleetError as error:
        return Validation(problems=error.problems)
    return Validation(remarks=found.remarks, totals=found.totals)
