"""Define the JSON document that has everything in a report. Pure.

`gpufleet report --json` prints the document, and `--from` reads it. The page and the manifest are
made only from the document, so the same document always gives the same bytes. The document has
texts from nodes and operators. `clean_document` removes secrets and control characters from these
texts.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, Literal, TypeVar, get_origin

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from gpufleet.errors import FleetError
from gpufleet.redact import hide_secrets
from gpufleet.sanitize import printable

SCHEMA: Final = 1
"""Version of the document. It is increased if a key changes its meaning or is removed."""
MOST_GPUS = 64
"""Maximum number of GPUs of a node, as in the probe."""
MOST_PROBLEMS = 5
"""Maximum number of problems reported for an invalid file."""

Index = Annotated[int, Field(ge=0, lt=MOST_GPUS)]
Texts = tuple[str, ...]
Digests = dict[str, tuple[str, str]]
"""{path of a file in a model: (algorithm, digest in hex)}."""


class Form(BaseModel):
    """A part of a document. It must have exactly its keys, with exactly their types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Checkout(Form):
    """The state in git of the folder with the settings."""

    commit: str = ""
    """The whole hash of the commit, or "" if there is no commit."""
    date: str = ""
    changed: Texts = ()
    """Files that are not committed."""
    problem: str = ""
    """Why git does not answer, or that the folder is not in git."""


class Gpu(Form):
    """One GPU that answers NVML."""

    index: Index
    name: str
    memory_mib: int | None
    numa: int | None
    nics: tuple[tuple[str, str], ...] = ()
    """The nearest network cards, each with the PCIe class of the connection."""
    replicas: Texts = ()
    """The replicas that run on the GPU."""
    unfit: str = ""
    """The reason why no work may be placed on the GPU, or ""."""


class Island(Form):
    """GPUs that are all linked to each other by NVLink."""

    gpus: tuple[Index, ...]
    links: str
    """The links as text, for example `NV18 between every pair`."""


class Tier(Form):
    """Groups of GPUs. Any two GPUs of a group have at most this PCIe distance."""

    name: str
    groups: tuple[tuple[Index, ...], ...]


class Version(Form):
    """The version of one part of a node, and the version that is declared for it."""

    part: str
    found: str | None
    """The version on the node. None: not known. "": the node does not have the part."""
    declared: str = ""
    """The declared version. "": no version is declared."""
    agrees: bool | None = None
    """Whether both versions agree. None: not known, or no version is declared."""


class Node(Form):
    """One node of the inventory."""

    name: str
    groups: Texts = ()
    gpu_node: bool = True
    silent: str = ""
    """The reason why nothing is known about the node, or ""."""
    system: str = ""
    gpus: tuple[Gpu, ...] = Field(default=(), max_length=MOST_GPUS)
    islands: tuple[Island, ...] = ()
    """NVLink islands of two or more GPUs."""
    tiers: tuple[Tier, ...] = ()
    """The PCIe distances, with the shortest first."""
    notes: Texts = ()
    """Remarks about the node's links and its cordon."""
    versions: tuple[Version, ...] = ()
    packages: dict[str, str] = {}
    """Installed packages of the driver, the kernel and CUDA."""
    releases: Texts = ()
    """Complete releases of vLLM on the node."""


class Replica(Form):
    """One replica in its current state."""

    name: str
    model: str
    state: str
    serves: bool
    why: Texts = ()
    nodes: Texts = ()


class Model(Form):
    """An entry of `serving`."""

    name: str
    source: str
    """The model's repository, or its path on the nodes."""
    revision: str = ""
    declared: str
    """The declared number of replicas. `fit`: as many as there are GPUs for."""
    nodes: Texts = ()
    """The nodes that declare the entry."""
    files: Digests = {}
    """The hashes in the lock of models. It is empty if the model is not locked."""
    adapters: Texts = ()
    """
    LoRA adapters, as `NAME: SOURCE at REVISION`. For an adapter at a path, the hash of its weights
    replaces the revision.
    """
    release: str = ""
    """The release of vLLM that is declared for the model."""


class PlanRow(Form):
    """One part of a model, and the nodes that serve the same part."""

    nodes: str
    model: str
    replicas: str
    gpus: str
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    ports: str


class Candidate(Form):
    """A way to divide a model over GPUs that the planner has considered."""

    model: str
    nodes: str
    chosen: bool
    division: str
    replicas: int
    verdict: str
    reason: str


class Plan(Form):
    """The current plan: a place for each replica, and the reasons."""

    unknown: Texts = ()
    """Why it is not known whether there is a plan. If set, all other values are empty."""
    refused: Texts = ()
    """Why there is no plan. If set, all other values are empty."""
    rows: tuple[PlanRow, ...] = ()
    reasons: Texts = ()
    candidates: tuple[Candidate, ...] = ()
    changes: Texts = ()
    """What a deploy would change in running replicas."""
    totals: str = ""


class Capacity(Form):
    """The capacity of those replicas of a model that are equal."""

    model: str
    replicas: str
    source: Literal["measured", "estimate", "not known"]
    requests_per_second: float | None = None
    """The measured requests per second of each replica."""
    measured: AwareDatetime | None = None
    kv_tokens: int | None = None
    """The estimated number of tokens for which the KV cache of each replica has memory."""
    concurrency: float | None = None
    """
    The estimated number of requests of full length that each replica can serve at the same time.
    """
    why: str = ""
    """For which requests the capacity is valid, or why it is not known."""


class Finding(Form):
    """A problem that `gpufleet doctor` reports."""

    severity: Literal["outage", "degraded", "risk", "notice"]
    subject: str
    what: str
    evidence: Texts = ()
    cause: str = ""
    do: str = ""
    page: str = ""


class Moved(Form):
    """One difference between a node and its declaration."""

    matters: str
    what: str
    source: str
    remedy: str


class NodeDrift(Form):
    """All differences between a node and its declaration."""

    node: str
    state: str
    moved: tuple[Moved, ...] = ()
    unread: Texts = ()


class Drift(Form):
    """The drift of the fleet."""

    whole: bool
    """
    Whether the changes that deploys would make were compared too. If not, only probes and locks
    were compared.
    """
    nodes: tuple[NodeDrift, ...] = ()
    refused: Texts = ()


class Upgrade(Form):
    """An upgrade or a rollback, from its journal."""

    id: str
    kind: str
    what: str
    by: str
    started: AwareDatetime
    ended: AwareDatetime
    outcome: str
    why: Texts = ()


class Certificate(Form):
    """The certificate that a server shows to its clients."""

    server: str
    status: Literal["OK", "WARN", "UNKNOWN", "FAIL"]
    ends: dt.date | None
    what: str
    proof: str


class Document(Form):
    """The state of a fleet at one time."""

    schema_: Literal[1] = Field(default=SCHEMA, alias="schema")
    inventory: str
    when: AwareDatetime
    version: str
    """The version of gpufleet."""
    checkout: Checkout
    nodes: tuple[Node, ...]
    models: tuple[Model, ...] = ()
    replicas: tuple[Replica, ...] = ()
    missing: Texts = ()
    """A sentence for each model that has fewer replicas than its entry declares."""
    plan: Plan
    capacity: tuple[Capacity, ...] = ()
    findings: tuple[Finding, ...] = ()
    drift: Drift
    upgrades: tuple[Upgrade, ...] = ()
    """The upgrades, with the last one first."""
    certificates: tuple[Certificate, ...] = ()
    files: dict[str, str] = {}
    """SHA-256 of the inventory, its variables and locks, by path below the project."""
    unknown: Texts = ()
    """A sentence for everything that could not be read."""

    @property
    def exit_status(self) -> int:
        """
        Return the exit status of the command: 0 if everything is known, 1 if parts are unknown.
        """
        return 1 if self.unknown else 0


AnyForm = TypeVar("AnyForm", bound=Form)


def read_form(kind: type[AnyForm], text: str, where: str, made_by: str) -> AnyForm:
    """
    Return the document or manifest in the text of a file.

    If the text is invalid, raises `FleetError` with the file and the invalid keys.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
    problems = [
        f"{where}: {'.'.join(map(str, each['loc'])) or 'the file'}: {_fault(each['type'])}: give a "
        f"file that `{made_by}` of this gpufleet wrote"
        for each in faults[:MOST_PROBLEMS]
    ]
    raise FleetError(*map(printable, problems))


def _fault(kind: str) -> str:
    known = {
        "json_invalid": "is not JSON",
        "missing": "is missing",
        "extra_forbidden": "is not a known key",
        "literal_error": "has a value that is not allowed",
    }
    return known.get(kind, "has a value of the wrong type")


def form_text(value: Form) -> str:
    """Return a document or a manifest as text. The same value always gives the same bytes."""
    return value.model_dump_json(by_alias=True, indent=1) + "\n"


def clean_document(document: Document, secrets: Iterable[str]) -> Document:
    """Return a document without secrets and control characters in its texts."""
    hidden = tuple(secrets)

    def clean(text: str) -> str:
        # Secrets are hidden before and after `printable`. A control character in a secret could
        # hide the secret from one of the two, but not from both.
        return hide_secrets(printable(hide_secrets(text, hidden)), hidden)

    changed: Document = _each_text(document, clean)
    return changed


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Form):
        # Words of a fixed set come from gpufleet and stay unchanged.
        texts = {
            name: _each_text(getattr(value, name), change)
            for name, field in type(value).model_fields.items()
            if get_origin(field.annotation) is not Literal
        }
        return value.model_copy(update=texts)
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _each_text(each, change) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_each_text(each, change) for each in value)
    return value
