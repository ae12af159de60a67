"""Define the forms of answers as pydantic types. `answer_forms` maps programs to these types.

Keys that a form does not have are ignored, except in closed forms, where they are an error. Pure.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, with_config

# pydantic supports the TypedDict of the typing module only from Python 3.12 on.
from typing_extensions import TypedDict

# Times up to the year 9999, which every calendar supports.
Time = Annotated[float, Field(ge=0, le=253402300799)]
Number = Annotated[float, Field(ge=-1e15, le=1e15)]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Digits = Annotated[str, Field(pattern=r"^[0-9]{0,9}$")]
UPGRADE_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
"""
The pattern of upgrade ids. It is strict, because ids are printed in commands that people paste.
"""
UpgradeId = Annotated[str, Field(pattern=UPGRADE_ID)]
Names = list[str]
# JSON has no tuples, so a list is accepted as a tuple.
Row = BeforeValidator(lambda each: tuple(each) if isinstance(each, list) else each)
Place = Annotated[tuple[str, Count], Row]
"""An address and a port."""
ModelFile = Annotated[tuple[Count, str], Row]
"""The size of a file in bytes, and its digest."""
Microseconds = Annotated[int, Field(ge=0, le=253402300799 * 1_000_000)]
JournalLines = list[Annotated[tuple[Microseconds, int | None, int | None, str], Row]]
"""The microseconds since 1970, the PID, the priority and the message of each line."""
Closed = with_config(ConfigDict(extra="forbid"))
"""
Refuses unknown keys. It is used for objects whose keys become the names of function arguments.
"""


class Missing(TypedDict):
    missing: str


class Error(TypedDict):
    error: str


class Document(TypedDict):
    schema: Literal[1]


class Problem(TypedDict):
    error: str | None


# Marks on nodes

Lock = TypedDict("Lock", {"id": UpgradeId, "owner": str, "from": str, "since": Time, "what": str})

Deploy = TypedDict(
    "Deploy",
    {
        "id": UpgradeId,
        "owner": str,
        "from": str,
        "since": Time,
        "what": str,
        "process": Count,
        "pid": Count,
    },
)


class Mark(TypedDict):
    by: str
    why: str
    since: Time
    upgrade: NotRequired[UpgradeId | None]


# Servers


class Http(TypedDict):
    status: NotRequired[Count | None]
    error: NotRequired[str | None]
    body: NotRequired[str | None]


class UnitProperties(TypedDict):
    error: NotRequired[str]
    ActiveState: NotRequired[str]
    SubState: NotRequired[str]
    Result: NotRequired[str]
    NRestarts: NotRequired[Digits]
    ExecMainStatus: NotRequired[str]


class Unseen(TypedDict):
    """Why there is no observation of a server."""

    error: Annotated[str, Field(min_length=1)]


class Seen(TypedDict):
    """One observation of a server."""

    unit: UnitProperties
    started: NotRequired[str | None]
    journal: NotRequired[Names]
    health: NotRequired[Http]
    key_error: NotRequired[str]
    models: NotRequired[list[str | None]]
    models_error: NotRequired[Http]
    without_key: NotRequired[dict[str, Count | None]]
    kind: NotRequired[str]
    completion_error: NotRequired[Http]
    adapters: NotRequired[dict[str, Http]]


class Exporter(TypedDict):
    unit: UnitProperties | None
    status: NotRequired[Count | None]
    error: NotRequired[str | None]
    missing: NotRequired[Names]
    without_password: NotRequired[Count | None]
    exposed: NotRequired[Names | None]


class Endpoints(Document):
    stages: dict[str, Seen | Unseen]
    metrics: dict[str, Exporter | Unseen]


# A change of the fleet


@Closed
class UnitLook(TypedDict):
    unit: str
    active: str
    sub: str
    since: Time | None
    started: str | None
    fingerprint: str | None
    release: str
    restarts: Count


class UnitReady(TypedDict):
    unit: str
    ready: bool
    seconds: Number
    since: NotRequired[Time | None]
    at: NotRequired[Time | None]
    served_name: NotRequired[str | None]
    fingerprint: NotRequired[str | None]
    keyed: NotRequired[bool]
    adapters: NotRequired[Names]
    restarts: NotRequired[Count]
    seen: NotRequired[Seen | Unseen]


class NextUnits(TypedDict):
    plan: str
    units: dict[str, str]
    remove: Names


class KeptUnits(TypedDict):
    id: str
    at: Time
    units: dict[str, str | None]


@Closed
class ReleaseLook(TypedDict):
    id: str
    whole: bool
    built: Time | None
    users: Names


class Hold(Document):
    problem: str | None
    held: bool
    lock: Lock | None
    deploy: Deploy | None
    why: str | None


class Change(Document):
    """The answer of `change/change`. Each action prints only some of the keys."""

    problem: str | None
    clock: NotRequired[Time]
    boot_id: NotRequired[str | None]
    lock: NotRequired[Lock | None]
    before: NotRequired[Lock | None]
    ours: NotRequired[bool]
    deploy: NotRequired[Deploy | None]
    cordon: NotRequired[Mark | None]
    drained: NotRequired[dict[str, Mark | None]]
    next: NotRequired[NextUnits | None]
    kept: NotRequired[list[KeptUnits]]
    units: NotRequired[list[UnitLook] | list[UnitReady]]
    releases: NotRequired[list[ReleaseLook]]
    changed: NotRequired[Names]
    unchanged: NotRequired[Names]
    # Units for the action `switch`, and releases for the action `collect`.
    removed: NotRequired[Names]
    cut: NotRequired[Names]
    stopped_at: NotRequired[Time | None]
    down_at: NotRequired[Time | None]
    started_at: NotRequired[Time | None]
    journal: NotRequired[Names]
    left: NotRequired[dict[str, Count | None]]
    seconds: NotRequired[Number]
    stays: NotRequired[dict[str, str]]
    freed_bytes: NotRequired[Count]


# The state of a node


@Closed
class FileState(TypedDict):
    kind: Literal["file", "directory", "link", "special file"]
    user: str
    group: str
    mode: Annotated[int, Field(ge=0, le=0o7777)]
    sha256: NotRequired[str]
    target: NotRequired[str]
    secret: NotRequired[Count]


@Closed
class UserState(TypedDict):
    home: str
    shell: str
    group: str
    groups: Names


@Closed
class PackageState(TypedDict):
    version: str
    installed: bool
    held: bool


@Closed
class UnitState(TypedDict):
    load: NotRequired[str]
    active: NotRequired[str]
    sub: NotRequired[str]
    file_state: NotRequired[str]
    needs_reload: bool
    fragment: NotRequired[str]
    restarts: Count
    has_file: bool
    on_disk: bool
    started: str | None


class Snapshot(Document):
    files: dict[str, FileState | Error | None]
    lines: dict[str, Names | Error]
    users: dict[str, UserState | Error | None]
    groups: dict[str, Count | Error | None]
    packages: dict[str, PackageState | Error | None]
    units: dict[str, UnitState | Error]
    units_like: dict[str, Names | Error]
    files_like: dict[str, Names | Error]
    listings: dict[str, Names | Error | None]
    package_manager: Literal["apt", "dnf"]
    packages_like: dict[str, Names | Error]
    streams: dict[str, str | Error | None]
    dpkg_unfinished: Names | Error
    leftovers: Names | Error


class Content(TypedDict):
    content: NotRequired[str]
    bytes: NotRequired[Count]
    hidden: NotRequired[bool]
    error: NotRequired[str | None]


class Contents(Document):
    files: dict[str, Content | None]


class Setting(TypedDict):
    file: str
    value: int


class KernelSetting(TypedDict):
    value: NotRequired[int]
    later: NotRequired[Setting | None]
    absent: NotRequired[bool]
    error: NotRequired[str]


class KernelSettings(Document):
    applied: bool
    settings: dict[str, KernelSetting]


class Remains(TypedDict):
    units: list[str]
    packages: list[str]
    tables: list[str]
    paths: list[str]
    accounts: list[str]


class NodeRemains(Document):
    error: str
    found: Remains


class Failed(Document):
    """An answer that contains only the reason for a failure."""

    error: Annotated[str, Field(min_length=1)]


class Done(Document):
    """The result of an action. The error is "" if the action succeeded."""

    error: str


class FirewallLook(Document):
    error: Literal[""]
    installed: bool
    user: bool
    loaded: str | None
    canonical: str | None
    saved: bool
    pending: bool
    service: str


class Server(Problem):
    active: bool
    in_force: bool


# GPUs


class KernelModule(TypedDict):
    kernel: str
    running: bool
    newest: bool
    nvidia: str | Missing
    signer: str | Missing


class KernelModules(Document):
    error: Literal[""]
    kernels: list[KernelModule] | Missing
    secure_boot: bool | Missing
    enrolled: bool | Missing
    said: NotRequired[dict[str, str]]


class Holder(TypedDict):
    pid: Count
    name: str
    unit: str | None
    devices: Names


class StoppedUnits(TypedDict):
    units: Names
    modules: Names


class ModuleFile(TypedDict):
    version: str | Missing
    signer: str | Missing
    file: str | Missing


class LibraryFile(TypedDict):
    file: str
    version: str | Missing


class DriverFiles(TypedDict):
    module: str | Missing
    proc: str | Missing
    disk: ModuleFile | Missing
    kernels: list[KernelModule] | Missing
    library: LibraryFile | Missing
    nvml: str | Missing


class DriverSystem(TypedDict):
    modules: Names | Missing
    reboot_required: bool | Missing


class DriverLook(Document):
    error: Literal[""]
    boot_id: str | Missing
    kernel: str | Missing
    driver: DriverFiles
    system: DriverSystem
    holders: list[Holder]
    used_by: Names
    active: Names
    kept: StoppedUnits
    barred: Names
    mark: str | None


class DriverChange(Done):
    busy: NotRequired[bool]


class UnitJournal(Document):
    here: Names | Missing
    rank: int | Missing | None
    clock: Count
    lines: JournalLines | Missing
    more: bool
    cursor: str | None
    clocks: dict[str, Number] | Missing


class UnitDifference(TypedDict):
    drop_ins: list[str]
    reload: bool
    signal: str | None


class PlacedModel(TypedDict):
    directory: str
    complete: bool
    missing: list[str]
    changed: list[str]


class TriedPort(TypedDict):
    address: str
    port: int
    error: str | None


class FailureEvidence(Document):
    clock: Number
    boot: Time | Missing
    stages: dict[str, JournalLines | Missing]
    units: dict[str, UnitDifference | Missing]
    models: dict[str, PlacedModel | Missing]
    kernel: JournalLines | Missing
    changes: list[Annotated[tuple[Time, str], Row]] | Missing
    certificates: list[Annotated[tuple[str, str, Time], Row]] | Missing
    connections: dict[str, TriedPort]


class MetricsText(TypedDict):
    text: str


class ReplicaCounts(TypedDict):
    seconds: Number
    servers: dict[str, Annotated[tuple[MetricsText | Unseen, MetricsText | Unseen], Row]]


class ReplicaMetrics(Document):
    replicas: dict[str, ReplicaCounts | Missing] | Missing


# Replicas over nodes


class PortUser(TypedDict):
    program: str
    pid: Count
    unit: str | None


class ReleaseThere(TypedDict):
    whole: bool
    vllm: str | None
    ray: str | None


class Preflight(Document):
    address: str | None
    mtu: Count | Missing
    routes: dict[str, str | Missing] | Missing
    free: list[Count]
    used: dict[str, PortUser | None] | Missing
    udp: Count | None
    udp_user: PortUser | None
    spares: list[Count]
    release: ReleaseThere | Missing
    files: dict[str, ModelFile] | Missing


class ClockDifference(TypedDict):
    ahead: Number
    within: Number


class Heard(TypedDict):
    bytes: Count
    datagrams: Count
    of: Count


class Exchange(Document):
    unbound: dict[str, str]
    connected: dict[str, dict[Digits, str | None]]
    clocks: dict[str, ClockDifference]
    heard: dict[str, Heard]


class StageUnit(TypedDict):
    model: str
    replica: Count
    rank: Count
    port: Count
    gpus: Names
    kind: NotRequired[str]
    side_channel: Count
    release: str
    arguments: Names


class ForeignUnit(TypedDict):
    unit: str
    foreign: Literal[True]


class Probe(TypedDict):
    """Only a part of a probe's document. `node.probe_document` and `checks` validate the rest."""

    stages: NotRequired[list[StageUnit | ForeignUnit | Missing] | Missing]
    files: NotRequired[dict[str, str | Missing]]
    upgrade: NotRequired[Lock | Missing | None]
    cordon: NotRequired[Mark | Missing | None]


# Gateways and monitoring


@Closed
class GatewayServer(TypedDict):
    backend: str
    server: str
    status: str
    sessions: Count
    queued: Count
    drained: bool


class Gateway(Problem):
    runs: bool
    fingerprint: str
    servers: list[GatewayServer]
    drained: Names
    unknown: Names
    configured: dict[str, Place]
    models: Names
    keys: dict[str, str]


class Target(TypedDict):
    targets: Names
    labels: NotRequired[dict[str, str]]


class TargetFiles(TypedDict):
    files: dict[str, list[Target]]


class Matcher(TypedDict):
    name: str
    value: str
    isRegex: bool
    isEqual: NotRequired[bool]


class SilenceStatus(TypedDict):
    state: str


class Silence(TypedDict):
    """A silence in the form of Alertmanager's API."""

    id: str
    status: SilenceStatus
    matchers: list[Matcher]
    createdBy: str
    comment: str
    endsAt: str


class Silences(Problem):
    silences: list[Silence]


class Record(Document):
    error: str
    recorded: Names


# Trees that nodes copy


Transfer = TypedDict(
    "Transfer",
    {
        "schema": Literal[1],
        "error": str,
        "whole": NotRequired[bool],
        "kind": NotRequired[Names],
        "digest": NotRequired[str],
        "bytes": NotRequired[Count],
        "files": NotRequired[Count],
        "found": NotRequired[Count],
        "sent": NotRequired[Count],
        "seconds": NotRequired[Number],
        "port": NotRequired[Count],
        "remarks": NotRequired[Names],
        "from": NotRequired[dict[str, Count]],
    },
)


class Progress(Document):
    bytes: Count | None
    total: Count | None
    step: NotRequired[str | None]
    line: NotRequired[str | None]
    left: NotRequired[Names]


# Checks before users get access


class PageLook(TypedDict):
    status: NotRequired[Count | None]
    body: NotRequired[str]
    error: NotRequired[str]


class TlsLook(TypedDict):
    verified: bool
    why: str
    certificate: str


class ModelLook(TypedDict):
    complete: bool
    missing: Names
    extra: Names
    changed: Names
    wrong: Names
    hashed: Count
    bytes: Count


class NodeLookAround(Document):
    began: Time
    clock: Time
    names: dict[str, Names | Missing]
    pages: dict[str, Missing | PageLook]
    tls: dict[str, Missing | TlsLook]
    models: dict[str, Missing | ModelLook]
    folders: dict[str, Count | Missing]
    firewall: bool | Missing


class AlertReceipt(Problem):
    before: str
    after: str
