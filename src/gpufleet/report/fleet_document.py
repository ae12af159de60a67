"""Define the JSON document with everything in a report.  Pure.

`gpufleet report --json` prints the document, `--from` reads it. The page and the manifest are made
only from the document, so the same document gives the same bytes. It has texts from nodes and
operators: `clean_document` removes secrets and control characters from them.
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
"""Version of the document; increased when a key changes its meaning or is removed."""
MOST_GPUS = 64
"""Maximum number of GPUs of a node, as in the probe."""
MOST_PROBLEMS = 5
"""Maximum number of problems reported for an invalid file."""

Index = Annotated[int, Field(ge=0, lt=MOST_GPUS)]
Texts = tuple[str, ...]
Digests = dict[str, tuple[str, str]]
"""{path of a file in a model: (algorithm, digest in hex)}."""


class Form(BaseModel):
    """A part of a document: exactly these keys, of exactly these types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Checkout(Form):
    """The settings' folder in git."""

    commit: str = ""
    """Whole; "": there is none."""
    date: str = ""
    changed: Texts = ()
    """Files that are not committed."""
    problem: str = ""
    """Why git cannot tell, or that this is no checkout."""


class Gpu(Form):
    """One GPU that answers."""

    index: Index
    name: str
    memory_mib: int | None
    numa: int | None
    nics: tuple[tuple[str, str], ...] = ()
    """The nearest network cards, each with its PCIe class."""
    replicas: Texts = ()
    """That run on it."""
    unfit: str = ""
    """Why no work may be placed on it."""


class Island(Form):
    """GPUs that are all linked to each other by NVLink."""

    gpus: tuple[Index, ...]
    links: str
    """`NV18 between every pair`."""


class Tier(Form):
    """Groups of GPUs with at most this PCIe distance between any two."""

    name: str
    groups: tuple[tuple[Index, ...], ...]


class Version(Form):
    """The version of one part of a node, beside what is declared of it."""

    part: str
    found: str | None
    """None: not known; "": it is not there."""
    declared: str = ""
    """"": nothing is declared."""
    agrees: bool | None = None
    """None: not known, or nothing is declared."""


class Node(Form):
    """One node of the inventory."""

    name: str
    groups: Texts = ()
    gpu_node: bool = True
    silent: str = ""
    """Why nothing is known of it."""
    system: str = ""
    gpus: tuple[Gpu, ...] = Field(default=(), max_length=MOST_GPUS)
    islands: tuple[Island, ...] = ()
    """NVLink islands of two or more GPUs."""
    tiers: tuple[Tier, ...] = ()
    """The nearest first."""
    notes: Texts = ()
    """What is to be known of its links, and its cordon."""
    versions: tuple[Version, ...] = ()
    packages: dict[str, str] = {}
    """Installed packages of the driver, the kernel and CUDA."""
    releases: Texts = ()
    """Complete releases of vLLM on it."""


class Replica(Form):
    """One replica in its present state."""

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
    """Its repository, or a path on the nodes."""
    revision: str = ""
    declared: str
    """How many replicas; `fit`: as many as the GPUs hold."""
    nodes: Texts = ()
    """That declare it."""
    files: Digests = {}
    """Hashes that the lock of models has; none: it is not locked."""
    adapters: Texts = ()
    """LoRA adapters: `NAME: SOURCE at REVISION`, or the hash of a path's weights."""
    release: str = ""
    """The release of vLLM that is declared for it."""


class PlanRow(Form):
    """One part of a model, and the nodes that hold the same part."""

    nodes: str
    model: str
    replicas: str
    gpus: str
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    ports: str


class Candidate(Form):
    """A division of a model that was considered."""

    model: str
    nodes: str
    chosen: bool
    division: str
    replicas: int
    verdict: str
    reason: str


class Plan(Form):
    """The present plan: a place for each replica, and why."""

    unknown: Texts = ()
    """Why it is unknown whether there is a plan; if set, all other values are empty."""
    refused: Texts = ()
    """Why there is no plan; if set, all other values are empty."""
    rows: tuple[PlanRow, ...] = ()
    reasons: Texts = ()
    candidates: tuple[Candidate, ...] = ()
    changes: Texts = ()
    """What a deploy would do with running replicas."""
    totals: str = ""


class Capacity(Form):
    """The measured capacity of a model's equal replicas."""

    model: str
    replicas: str
    source: Literal["measured", "estimate", "not known"]
    requests_per_second: float | None = None
    """Each, as measured."""
    measured: AwareDatetime | None = None
    kv_tokens: int | None = None
    """Each, by the estimate of its memory."""
    concurrency: float | None = None
    """Requests of full length at once, each, by the same estimate."""
    why: str = ""
    """For what it holds, or why it is not known."""


class Finding(Form):
    """A problem that `gpufleet doctor` names."""

    severity: Literal["outage", "degraded", "risk", "notice"]
    subject: str
    what: str
    evidence: Texts = ()
    cause: str = ""
    do: str = ""
    page: str = ""


class Moved(Form):
    """One deviation of a node from its declaration."""

    matters: str
    what: str
    source: str
    remedy: str


class NodeDrift(Form):
    """The drift of a node from its declaration."""

    node: str
    state: str
    moved: tuple[Moved, ...] = ()
    unread: Texts = ()


class Drift(Form):
    """The drift of the fleet."""

    whole: bool
    """Whether deploys were compared too; else only what probes and locks say."""
    nodes: tuple[NodeDrift, ...] = ()
    refused: Texts = ()


class Upgrade(Form):
    """An upgrade or a rollback, by its journal."""

    id: str
    kind: str
    what: str
    by: str
    started: AwareDatetime
    ended: AwareDatetime
    outcome: str
    why: Texts = ()


class Certificate(Form):
    """The certificate that a server presents."""

    server: str
    status: Literal["OK", "WARN", "UNKNOWN", "FAIL"]
    ends: dt.date | None
    what: str
    proof: str


class Document(Form):
    """A fleet at one moment."""

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
    """A sentence for each model that has fewer replicas than are declared."""
    plan: Plan
    capacity: tuple[Capacity, ...] = ()
    findings: tuple[Finding, ...] = ()
    drift: Drift
    upgrades: tuple[Upgrade, ...] = ()
    """The last first."""
    certificates: tuple[Certificate, ...] = ()
    files: dict[str, str] = {}
    """SHA-256 of the inventory, its variables and locks, by path below the project."""
    unknown: Texts = ()
    """A sentence for everything that could not be read."""

    @property
    def exit_status(self) -> int:
        """Return the exit status of the command: 0 everything is known, 1 parts are unknown."""
        return 1 if self.unknown else 0


AnyForm = TypeVar("AnyForm", bound=Form)


def read_form(kind: type[AnyForm], text: str, where: str, made_by: str) -> AnyForm:
    """
    Parse a document or a manifest from a file's text.

    Raises `FleetError` with the file and the invalid keys in it.
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
    """Return a document or a manifest as a file's text; the same value gives the same bytes."""
    return value.model_dump_json(by_alias=True, indent=1) + "\n"


def clean_document(document: Document, secrets: Iterable[str]) -> Document:
    """Return a document without secrets and control characters in its texts."""
    hidden = tuple(secrets)

    def clean(text: str) -> str:
        # Twice: a control character within a secret hides it from one, and its escape from none.
        return hide_secrets(printable(hide_secrets(text, hidden)), hidden)

    changed: Document = _each_text(document, clean)
    return changed


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Form):
        # A word of a fixed set is gpufleet's own.
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
