"""Write what deploys/vllm.py declares of each node into a folder: declared.py runs it, dry."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable
from functools import wraps
from pathlib import Path
from typing import Any

from pyinfra import host, local

from benchmarks.converge.declared import FOLDER, NOTED, declared
from gpufleet.artifacts.operator_files import release_of
from gpufleet.converge.desired import Value
from gpufleet.fleet.run import node_plan, refusals
from gpufleet.operations import converge
from lab.state import write
from roles.verify import endpoints


def note_wanted() -> None:
    """Add what every `Converge` of this process wants to `NOTED`. Runs once per node."""
    begin = inspect.unwrap(converge.Converge.__init__)

    @wraps(begin)
    def noting(self: converge.Converge, wanted: Iterable[Value], **arguments: Any) -> None:
        NOTED.setdefault(host.name, []).extend(wanted)
        begin(self, wanted, **arguments)

    converge.Converge.__init__ = noting  # type: ignore[method-assign]


note_wanted()
local.include("deploys/vllm.py")
with refusals():
    node = node_plan()
    if node and node.settings.vllm:
        answering = [
            {"url": each.url, "name": each.served_name, "key_file": each.key_file}
            for each in endpoints(node)
        ]
        found = declared(
            NOTED[host.name],
            answering,
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
