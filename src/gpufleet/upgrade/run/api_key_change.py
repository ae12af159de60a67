"""
Refuse an upgrade after which changed servers would require another API key than clients send.

During the waves old and new servers run side by side, and each requires the key with which it was
started. But the gateway, or without a gateway the client, sends the same key to all servers of a
model. So a key cannot be changed in waves. `problems` is pure; `find_problems` queries gateways and
nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpufleet.artifacts.operator_files import read
from gpufleet.converge import snapshot
from gpufleet.converge.snapshot import FileState
from gpufleet.network.haproxy import GatewayState
from gpufleet.remote import payload
from gpufleet.serving.credentials import API_KEY_FILE
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.upgrade.plan.wave import Group, model_of
from gpufleet.upgrade.run.node_questions import NodeQuestion

if TYPE_CHECKING:
    from gpufleet.remote.query import Answer
    from gpufleet.upgrade.run.connections import Nodes
    from gpufleet.upgrade.run.traffic import Frontends

LOOK_SECONDS = 30
HOW = "docs/upgrade/upgrades.md, Another API key, has the order of steps"


@dataclass(frozen=True)
class WantedKey:
    """The API key with which a model's servers will be restarted, and on which nodes."""

    model: str
    nodes: tuple[str, ...]
    file: str
    """The value of `vllm.api_key_file`."""
    sha256: str


def wanted_keys(
    groups: Iterable[Group], settings: Mapping[str, NodeSettings], hashes: Mapping[str, str]
) -> Iterator[WantedKey]:
    """
    Yield the keys of the servers that `groups` start. `hashes` has each key's SHA-256, by file.

    Servers without a key are left out, because they accept any key.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for group in groups:
        for replica in group.replicas:
            if replica in group.goes:
                continue
            for node in group.nodes:
                here, model = settings[node], model_of(replica)
                file = here.engine_of(model).api_key_file if model in here.serving else None
                if file:
                    found.setdefault((model, file), set()).add(node)
    for (model, file), nodes in sorted(found.items()):
        yield WantedKey(model, tuple(sorted(nodes)), file, hashes[file])


def problems(
    started: Iterable[WantedKey],
    gateways: Mapping[str, GatewayState],
    nodes: Mapping[str, FileState] | None = None,
) -> Iterator[str]:
    """
    Yield sentences on servers that would refuse requests during the waves. `gateways` has the key
    that each gateway sends. Without gateways, `nodes` has the present key file of each node.
    """
    for each in started:
        key = f"{each.file} (`vllm.api_key_file`)"
        for gateway, state in sorted(gateways.items()):
            sent = state.keys.get(each.model)
            if sent == each.sha256 or each.model not in state.models:
                continue
            if sent is None:
                yield (
                    f"{each.model}: its servers would require {key}, but the gateway {gateway} "
                    "sends no key. First run `gpufleet deploy gateway INVENTORY`, so that the "
                    "gateway sends the key: a server that requires no key accepts any key. Then "
                    "upgrade"
                )
            else:
                yield (
                    f"{each.model}: {key} is not the key that the gateway {gateway} sends, and the "
                    "gateway sends the same key to old and new servers. Restore the former key and "
                    f"upgrade, and change the key separately: {HOW}"
                )
        for node in each.nodes if not gateways else ():
            there = (nodes or {}).get(node, FileState("unknown", error="the node was not queried"))
            if there.kind == "file" and there.sha256 != each.sha256:
                yield (
                    f"{each.model}: {key} is not the key that its servers on {node} have, and "
                    "clients send the same key to old and new servers. Restore the former key and "
                    f"upgrade, and change the key separately: {HOW}"
                )
            elif there.kind not in {"file", "absent"}:
                yield (
                    f"{each.model}: it is unknown whether {key} is the key that {node} has, "
                    f"because {API_KEY_FILE} could not be read there: "
                    f"{there.error or there.kind}"
                )


def find_problems(
    nodes: Nodes, front: Frontends, groups: Iterable[Group], settings: Mapping[str, NodeSettings]
) -> tuple[str, ...]:
    """
    Query the gateways, or the nodes if there is no gateway; return `problems`, each once.

    Raises `FleetError` if a gateway or a node gives no answer.
    """
    groups = tuple(groups)
    files = {each.servers.api_key_file for each in settings.values() if each.servers}
    hashes = {file: hashlib.sha256(read(file).strip()).hexdigest() for file in files if file}
    started = tuple(wanted_keys(groups, settings, hashes))
    if not started:
        return ()
    if states := front.states():
        return tuple(dict.fromkeys(problems(started, states)))
    questions = {
        node: ("secret", API_KEY_FILE, each.sha256) for each in started for node in each.nodes
    }
    programs = {
        node: NodeQuestion(
            payload.program("converge/snapshot", asked=[list(each)]),
            LOOK_SECONDS,
            "the query of its key",
        )
        for node, each in questions.items()
    }

    def key_file_state(node: str, said: Answer) -> FileState:
        if isinstance(said, str):
            return FileState("unknown", error=said)
        return snapshot.from_document(said, [questions[node]]).file(API_KEY_FILE)

    return tuple(dict.fromkeys(problems(started, {}, nodes.ask_until(programs, key_file_state, 0))))
