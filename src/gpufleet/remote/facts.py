"""Define pyinfra facts, which read a node's state for the pure modules.

A fact sends a program of `on_node/` over stdin (`_stdin=payload.program(...)`) and parses the JSON
document that the program prints. If the output has no document, the fact reports the node's output
as an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from shlex import quote
from typing import Any

from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase

from gpufleet.remote import sandbox
from gpufleet.remote.answer_forms import form_problem
from gpufleet.sanitize import last_lines

# With `exec`, no shell remains between the connection and the program. A node without Python
# reports this on stderr and prints nothing on stdout. The command still reads its input, because
# otherwise the sender would only see a closed pipe.
PYTHON = (
    "command -v python3 >/dev/null || "
    "{ echo 'no python3 on this node: install it (apt-get install python3)' >&2; "
    "while read -r _; do :; done; exit 97; }; "
    "exec python3 -I -"
)


class Serving(FactBase[dict[str, Any]]):
    """
    The state of a node's endpoints and exporters, from `on_node/serving/endpoints.py`.

    ```python
    host.get_fact(Serving, _stdin=payload.program("serving/endpoints", stages=[...]), _timeout=180)
    {"schema": 1, "stages": {"tiny-0": {"unit": {...}, "health": {...}, ...}}, "metrics": {}}
    ```
    """

    def command(self) -> str:
        return PYTHON

    def process(self, output: Iterable[str]) -> dict[str, Any]:
        return document(output, "the query of the endpoints", "serving/endpoints")


class _Printed(FactBase[dict[str, Any]]):
    """The document that a program printed, or `{}` if there was no answer."""

    what: str
    program: str

    @staticmethod
    def default() -> dict[str, Any]:
        return {}

    def command(self) -> str:
        return PYTHON

    def process(self, output: Iterable[str]) -> dict[str, Any]:
        return document(output, self.what, self.program)


class NodeSnapshot(_Printed):
    """
    The state of a node, to compare with the desired state, from `on_node/converge/snapshot.py`.

    ```python
    host.get_fact(
        NodeSnapshot, _stdin=payload.program("converge/snapshot", asked=[["file", "/etc/hosts"]])
    )
    {"schema": 1, "files": {"/etc/hosts": {"kind": "file", "mode": 420, ...}}, "users": {}, ...}
    ```

    If there was no answer, the result is `{}`. pyinfra has then marked the host as failed and shown
    its output.
    """

    what = "the snapshot of the node"
    program = "converge/snapshot"


class Contents(_Printed):
    """
    The contents of small files that all users may read, from `on_node/converge/read_files.py`.

    ```python
    host.get_fact(
        Contents, _stdin=payload.program("converge/read_files", paths=["/etc/hosts"], most=262144)
    )
    {"schema": 1, "files": {"/etc/hosts": {"content": "MTI3LjAu..."}}}
    ```

    The result is `{}` without an answer.
    """

    what = "the query of files"
    program = "converge/read_files"


class FirewallRules(_Printed):
    """
    The loaded and the wanted nftables table of a node, from `on_node/network/firewall.py`.

    ```python
    host.get_fact(
        FirewallRules, _stdin=payload.program("network/firewall", action="look", wanted=...)
    )
    {"schema": 1, "error": "", "loaded": "table inet gpufleet {...", "canonical": "...", ...}
    ```

    If there was no answer, the result is `{}`. Depending on `action`, the program can also load
    rules.
    """

    what = "the query of the firewall"
    program = "network/firewall"


class KernelSettings(_Printed):
    """
    The kernel's settings, now and after a boot, from `on_node/converge/sysctl.py`.

    ```python
    host.get_fact(KernelSettings, _stdin=payload.program("converge/sysctl", wanted={...}, ...))
    {"schema": 1, "applied": False, "settings": {"vm.swappiness": {"value": 60, "later": None}}}
    ```

    If there was no answer, the result is `{}`. With `apply`, the program also changes the settings.
    """

    what = "the query of the kernel's settings"
    program = "converge/sysctl"


class NodeRemains(_Printed):
    """
    The parts of gpufleet that exist on a node, from `on_node/converge/remove.py`.

    ```python
    host.get_fact(NodeRemains, _stdin=payload.program("converge/remove", action="look", ...))
    {"schema": 1, "error": "", "found": {"units": ["vllm-tiny-0.service"], "packages": [], ...}}
    ```

    If there was no answer, the result is `{}`. Depending on `action`, the program can also remove
    the parts.
    """

    what = "the query of gpufleet's parts"
    program = "converge/remove"


class ReleaseFlags(FactBase[dict[str, Any]]):
    """
    The flags of a vLLM release on the node, from `on_node/flags/schema.py`.

    ```python
    host.get_fact(
        ReleaseFlags,
        python="/opt/vllm/releases/ID/bin/python",
        seconds=60,
        _stdin=extract.program(),
    )
    {"schema": 1, "vllm": "0.32.0", "flags": [...], ...}
    ```

    The release's own code runs as a user without privileges, never as root.

    If there is no such release, the result is `{"refused": sentence}`. If there was no answer, the
    result is `{}`.
    """

    @staticmethod
    def default() -> dict[str, Any]:
        return {}

    def command(self, python: str, seconds: float) -> str:
        # A refusal is also an answer. pyinfra would discard it if the program exited with an error.
        return f"{sandbox.sandbox_prefix(seconds)} {quote(python)} -I -; exit 0"

    def process(self, output: Iterable[str]) -> dict[str, Any]:
        return document(output, "the reading of the release's flags")


def document(output: Iterable[str], what: str, program: str = "") -> dict[str, Any]:
    """
    Return the JSON document on the last line of a program's output.

    Earlier lines come from the node itself, such as a login banner or a warning of a shell. `what`
    is the program's name in messages. `program` is the program's file, which determines the form of
    the document. Raises `FactProcessError` with the node's output. Any other exception would end
    the whole run.
    """
    lines = list(output)
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError, RecursionError):  # RecursionError: nested without end
        raise FactProcessError(
            f"{what} printed no JSON document; the node said: {last_lines(lines)}"
        ) from None
    if not isinstance(found, dict):
        raise FactProcessError(f"{what} printed {lines[-1][:80]!r}, which is not a JSON object")
    if problem := form_problem(program, found):
        raise FactProcessError(f"{what}: {problem}")
    return found
