"""Validate the answer of a program on a node before other code reads the answer.

A node may print any JSON, because it may be broken or hostile, or run an older program. If an
answer does not have its program's form, it is replaced by a sentence, as if it were missing. So
readers can rely on the types in `answer_shapes`. Pure.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gpufleet.errors import FleetError, answer_fault
from gpufleet.on_node.common.answers import OTHER_FORM
from gpufleet.remote import answer_shapes as shapes
from gpufleet.sanitize import printable

FORMS: Mapping[str, Any] = {
    "change/change": shapes.Change,
    "change/hold": shapes.Hold,
    "common/unit_journal": shapes.UnitJournal,
    "converge/read_files": shapes.Contents,
    "converge/reload_config": shapes.Server,
    "converge/remove": shapes.NodeRemains,
    "converge/snapshot": shapes.Snapshot,
    "converge/sysctl": shapes.KernelSettings,
    "converge/validate_config": shapes.Problem,
    "doctor/failure_evidence": shapes.FailureEvidence,
    "doctor/replica_metrics": shapes.ReplicaMetrics,
    "gpu_software/driver_reload": shapes.DriverChange,
    "gpu_software/driver_reload look": shapes.DriverLook | shapes.Failed,
    "gpu_software/kernel_modules": shapes.KernelModules | shapes.Failed,
    "monitoring/record": shapes.Record,
    "monitoring/silences": shapes.Silences,
    "monitoring/target_files": shapes.TargetFiles,
    "network/firewall": shapes.Done,
    "network/firewall look": shapes.FirewallLook | shapes.Failed,
    "network/gateway_drains": shapes.Gateway,
    "packages/transaction_progress": shapes.Progress,
    "preflight/alert_receipt": shapes.AlertReceipt,
    "preflight/node_look": shapes.NodeLookAround,
    "probe/probe": shapes.Probe,
    "reach/preflight": shapes.Preflight,
    "reach/reach": shapes.Exchange,
    "serving/endpoints": shapes.Endpoints,
    "transfer/build_progress": shapes.Progress,
    "transfer/folder_size": shapes.Progress,
    "transfer/transfer": shapes.Transfer,
}
"""
Maps a program to the form of its answer.

If the tasks of a program have different forms, the key also has the task. Only their readers check
the answers of programs that are not in this table.
"""


# Maps pydantic's error types to messages.
_KINDS = {
    "bool_type": "it must be true or false",
    "dict_type": "it must be an object",
    "extra_forbidden": "the key is unknown",
    "float_type": "it must be a number",
    "int_type": "it must be a whole number",
    "list_type": "it must be a list",
    "missing": "a key is missing",
    "string_type": "it must be a string",
}


def form_problem(program: str, document: Any) -> str | None:
    """
    Return why the answer of a program does not have the right form, or None if it is valid.

    >>> form_problem("monitoring/record", {"schema": 1, "error": 3, "recorded": []})
    "the node's answer is invalid: error is 3: it must be a string"
    """
    adapter = _adapter(program) or _adapter(program.partition(" ")[0])
    if adapter is None:
        return None
    try:
        adapter.validate_python(document, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        found = printable(repr(first["input"])[:80])
        wanted = _KINDS.get(first["type"], "the program writes a different kind of document")
        return f"the node's answer is invalid: {printable(where)} is {found}: {wanted}"
    # Raised for numbers with hundreds of digits.
    except (OverflowError, RecursionError, ValueError) as error:
        return f"the node's answer is invalid: {printable(answer_fault(error))}"
    return None


@cache
def _adapter(program: str) -> TypeAdapter[Any] | None:
    return TypeAdapter(FORMS[program]) if program in FORMS else None


@contextmanager
def refuse_malformed(node: str) -> Generator[None]:
    """Convert a reader's exception on a malformed answer to a `FleetError` that names the node."""
    try:
        yield
    except OTHER_FORM as error:
        why = printable(answer_fault(error))
        raise FleetError(f"{node}: the node's answer is invalid: {why}") from error
