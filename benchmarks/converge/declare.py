"""Write what deploys/vllm.py declares of each node into a folder: declared.py runs it, dry."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pyinfra import host, local

from benchmarks.converge.declared import FOLDER, declared
from gpufleet.artifacts.operator_files import release_of
from gpufleet.converge.desired import Value
from gpufleet.fleet.run import node_plan, refusals
from gpufleet.operations import converge
from lab.state import write
from roles.verify import endpoints


def listen() -> dict[str, list[Value]]:
    """Have every `Converge` of this process noted, once; return the notes."""
    found: dict[str, list[Value]] | None = getattr(converge.Converge, "noted", None)
    if found is not None:
        return found
    found = {}
    begin = converge.Converge.__init__

    def noting(self, wanted, **arguments):
        found.setdefault(host.name, []).extend(wanted)
        begin(self, wanted, **arguments)

    converge.Converge.__init__ = noting
    converge.Converge.noted = found
    return found


notes = listen()
local.include("deploys/vllm.py")
with refusals():
    node = node_plan()
    if node and node.settings.vllm:
        endpoints = [
            {"url": each.url, "name": each.served_name, "key_file": each.key_file}
            for each in endpoints(node)
        ]
        found = declared(
            notes[host.name],
            endpoints,
            release_of(node.settings.vllm),
            len(node.node.gpus),
        )
        folder = Path(os.environ[FOLDER])
        for name, content in found.contents.items():
            path = folder / "files" / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(0o600)
            path.write_bytes(content)
        write(folder / f"{host.name}.json", json.dumps(found.document, indent=1))
