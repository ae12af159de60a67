"""Run the planned stages of one node: release, model files, one unit a stage, until they answer."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand, deploy, operation
from pyinfra.context import ctx_state

from gpufleet.artifacts import model_files
from gpufleet.artifacts.model_files import Checkpoint
from gpufleet.artifacts.operator_files import read, release_of
from gpufleet.artifacts.release import BUILD_SECONDS, WAIT_SECONDS, Release, build_script
from gpufleet.converge.desired import (
    Directory,
    File,
    Group,
    NoOtherFiles,
    NoOtherUnits,
    Package,
    Unit,
    User,
    Value,
    Wanted,
)
from gpufleet.errors import FleetError
from gpufleet.fleet.run import Here, together
from gpufleet.operations import distribute, progress_watch
from gpufleet.operations.accept_flags import Proof, accepted, agreed
from gpufleet.operations.check_reachability import reached
from gpufleet.operations.converge import Converge
from gpufleet.operations.distribute import Goods, comes, copied
from gpufleet.operations.wait_ready import Endpoint, answering
from gpufleet.planning.planner import Stage
from gpufleet.remote import payload
from gpufleet.serving import flag_check
from gpufleet.serving import unit as units
from gpufleet.serving.credentials import (
    API_KEY_FILE,
    CREDENTIALS,
    NOT_FOR_UNITS,
    node_credentials,
    secret_files,
    unit_hashes,
)
from gpufleet.serving.flag_check import Started
from gpufleet.serving.unit import UnitFile
from gpufleet.settings.node_settings import Vllm
from gpufleet.templates import read_template
from gpufleet.upgrade.run.staged_units import next_files

UNITS = "vllm-*.service"
# What a unit that is not wanted any more may take to stop: settings/node_settings.py's longest
# drain, and the half minute that its unit adds.
LONGEST_STOP_SECONDS = 3600 + 30

# libnuma: vLLM's binding to memory nodes; its CPU build does not load without (measured).
# Compiler and Python's headers: Triton, FlashInfer and torch's inductor compile kernels when the
# first requests come; without one the engine starts healthy and dies of the first (measured).
PACKAGES = ("ca-certificates", "curl", "g++", "libnuma1", "python3-dev", "python3-venv")


@deploy("vLLM")
def vllm(here: Here) -> None:
    """
    Converge this node to exactly its planned stages; with none, it serves nothing.

    Packages, release and model files are brought before the first unit is touched, and each node's
    release has accepted the flags that its stages will have, and the nodes of each replica over
    nodes have proven that they reach each other: an outage is the model's load time. A stage
    restarts only when its process was started with something else than the plan now says.
    """
    if here.settings.vllm is None:
        nothing = Converge(Wanted(NoOtherUnits(UNITS, stop_seconds=LONGEST_STOP_SECONDS)))
        nothing.units(name="no stages")
        return
    together()
    found = prepared(here, here.settings.vllm)
    stages = found.stages
    stages.files(name="units")
    stages.units(name="stages")
    # Once nothing runs that was started with them.
    old = Converge(
        Wanted(
            *(_secret(name, content) for name, content in found.secrets.items()),
            NoOtherFiles(f"{CREDENTIALS}/*"),
        ),
        probed=False,
    )
    old.files(name="no other credentials")
    answering(
        endpoints(here, found.rendered),
        name="wait until every endpoint answers",
        _timeout=patience(here),
    )


@deploy("vLLM, prepared")
def beforehand(here: Here) -> None:
    """
    Bring everything that the planned stages need, and lay their units beside those that run.

    No unit is touched, nor any file that one reads when it starts: whatever ends and starts again
    before it is switched is what it was. Where the node is to serve nothing, that is laid there.
    """
    wanted = here.settings.vllm
    found = None if wanted is None else prepared(here, wanted, apart=True)
    planned_units = {stage.unit for stage in here.stages}
    there = Converge(
        next_files(
            found.rendered.values() if found else (),
            (
                unit
                for each in here.running
                if (unit := f"vllm-{each.id}.service") not in planned_units
            ),
            read_at_start(found.secrets) if found else (),
        )
    )
    there.files(name="units to switch to")


@dataclass(frozen=True)
class Prepared:
    """What a node has got by now, and what its stages will be started with."""

    stages: Converge
    """The units and files of the plan's stages: wanted, and not converged yet."""
    rendered: Mapping[Stage, UnitFile]
    secrets: Mapping[str, bytes] = field(repr=False)


def prepared(here: Here, wanted: Vllm, *, apart: bool = False) -> Prepared:
    """
    Bring packages, release and model files, and prove that stages can start; touch no unit.

    With `apart` files that running units would read at their next start stay as they are.
    """
    build = release_of(wanted)
    secrets = credentials(wanted, here)
    files = {
        stage: found
        for stage in here.stages
        if (found := model_files.checkpoint(here.settings.serving[stage.model]))
    }

    ground = Converge(
        foundation(wanted, build, secrets, apart=apart),
        watch=(build.mark, *marks(files.values())),
        probed=False,
    )
    ground.packages(name="packages")
    ground.accounts(name="service account")
    ground.files(name="directories, locks and credentials")
    release_there(ground, build)
    for found in host.loop(sorted(set(files.values()), key=lambda each: each.directory)):
        model_there(ground, found, wanted, distribute.of_model(found, here.everyone))

    proof = Proof(build, begun(here, wanted, build), here.origins)
    proofs = Converge(proof.wanted, watch=(build.mark,))
    accepted(proofs, proof, name=f"have release {build.id} accept its flags")
    agreed(name="no release has refused")

    rendered = unit_files(here, wanted, build, secrets)
    stages = Converge(services(here, rendered))
    reached(stages, here.stages, name="nodes of a replica reach each other")
    return Prepared(stages, rendered, secrets)


def release_there(ground: Converge, build: Release) -> None:
    """Have the release on the node: built once for nodes of its kind, and copied to the others."""
    goods = distribute.of_release(build)
    built(
        ground,
        build,
        goods,
        name=f"build release {build.id}",
        _timeout=BUILD_SECONDS + WAIT_SECONDS,
    )
    if goods and goods.others:
        copied(ground, goods, name=f"copy release {build.id}")
        built_after_all(
            ground,
            build,
            goods,
            name=f"build release {build.id} where it was not copied",
            _timeout=BUILD_SECONDS + WAIT_SECONDS,
        )


def model_there(ground: Converge, wanted: Checkpoint, vllm: Vllm, goods: Goods | None) -> None:
    """Have a model's files on the node: downloaded once, and copied to the others."""
    directory = release_of(vllm).directory
    staged_model(
        ground,
        wanted,
        vllm,
        directory,
        goods,
        name=f"stage {wanted.repository}",
        _timeout=model_files.DOWNLOAD_SECONDS,
    )
    if goods and goods.others:
        copied(ground, goods, name=f"copy {wanted.repository}")
        staged_after_all(
            ground,
            wanted,
            vllm,
            directory,
            goods,
            name=f"stage {wanted.repository} where it was not copied",
            _timeout=model_files.DOWNLOAD_SECONDS,
        )


def foundation(
    wanted: Vllm, build: Release, secrets: Mapping[str, bytes], *, apart: bool = False
) -> Wanted:
    """Return what a node needs before it can hold a release; `apart`: without what units read."""
    user = wanted.user
    used = {name: each for name, each in secrets.items() if name in NOT_FOR_UNITS}
    return Wanted(
        *(Package(name) for name in PACKAGES),
        Group(user),
        User(user, group=user, home="/var/lib/vllm"),
        *(
            Directory(path, mode=0o755)
            for path in ("/opt/vllm", "/opt/vllm/releases", "/opt/vllm/locks", "/opt/vllm/uv")
        ),
        Directory("/var/cache/gpufleet", mode=0o755),
        Directory("/var/lib/vllm", user=user, group=user, mode=0o755),
        Directory("/var/lib/vllm/models", user=user, group=user, mode=0o755),
        Directory("/etc/vllm", mode=0o755),
        Directory(CREDENTIALS, mode=0o700),
        Directory("/usr/local/libexec/gpufleet", mode=0o755),
        File(build.lock_path, build.lock),
        File(build.uv_lock_path, build.uv_lock),
        *(_secret(name, content) for name, content in used.items()),
        *(() if apart else read_at_start(secrets)),
    )


def read_at_start(secrets: Mapping[str, bytes]) -> tuple[File, ...]:
    """Return the files that units read when they start; their fingerprints cover them."""
    return (
        File(units.LAUNCHER, read_template("vllm-serve.sh").encode(), mode=0o755),
        File(units.RANK, payload.archive("rank/rank"), mode=0o755),
        *(_secret(name, each) for name, each in secrets.items() if name not in NOT_FOR_UNITS),
    )


def _secret(name: str, content: bytes) -> File:
    return File(f"{CREDENTIALS}/{name}", content, mode=0o600, secret=True)


def unit_files(
    here: Here, wanted: Vllm, build: Release, secrets: dict[str, bytes]
) -> dict[Stage, UnitFile]:
    """Return the unit of each stage of this node."""
    return {
        stage: units.render(
            stage,
            here.settings.serving[stage.model],
            wanted,
            release=build.id,
            toolkit=here.settings.cuda.toolkit if here.settings.cuda else None,
            credentials=unit_hashes(stage, here.settings.serving[stage.model], secrets),
        )
        for stage in here.stages
    }


def begun(here: Here, wanted: Vllm, build: Release) -> tuple[Started, ...]:
    """Return what each stage of this node will be started with, word by word."""
    return tuple(
        flag_check.started(
            stage,
            here.settings.serving[stage.model],
            wanted,
            release=build.id,
            toolkit=here.settings.cuda.toolkit if here.settings.cuda else None,
        )
        for stage in here.stages
    )


def services(here: Here, rendered: dict[Stage, UnitFile]) -> Wanted:
    """Return the planned stages' units, and that any other stage of ours is gone."""
    values: list[Value] = [NoOtherUnits(UNITS, stop_seconds=LONGEST_STOP_SECONDS)]
    for stage, unit in rendered.items():
        model = here.settings.serving[stage.model]
        values += [
            unit.file,
            Unit(
                stage.unit,
                fingerprint=unit.fingerprint,
                stop_seconds=units.stop_seconds(model),
            ),
        ]
    return Wanted(*values)


def planned(here: Here) -> tuple[Endpoint, ...]:
    """Return this node's endpoints as the plan has them; nothing is changed for that."""
    wanted = here.settings.vllm
    if wanted is None:
        return ()
    build = release_of(wanted)
    return endpoints(here, unit_files(here, wanted, build, credentials(wanted, here)))


def endpoints(here: Here, rendered: Mapping[Stage, UnitFile]) -> tuple[Endpoint, ...]:
    """Return where this node's stages answer, each server of them, as the node itself does."""
    wanted = here.settings.vllm
    if wanted is None:
        return ()
    return tuple(
        Endpoint(
            id=stage.id if port == stage.port else f"{stage.id} on port {port}",
            unit=stage.unit,
            url=f"http://{local(wanted.listen)}:{port}",
            served_name=units.served_name(stage, here.settings.serving[stage.model]),
            key_file=API_KEY_FILE if wanted.api_key_file else None,
            start_seconds=here.settings.serving[stage.model].start_seconds,
            fingerprint=unit.fingerprint,
            peers=tuple(node for node in stage.nodes if node != stage.node),
        )
        for stage, unit in rendered.items()
        for port in stage.servers
    )


def local(listen: str) -> str:
    """Return the address at which the node reaches an endpoint that listens on `listen`."""
    return "127.0.0.1" if listen in {"0.0.0.0", "::"} else listen  # noqa: S104


def patience(here: Here) -> int:
    """Return the seconds after which waiting for all endpoints ends, whatever else happens."""
    return (
        max((here.settings.serving[stage.model].start_seconds for stage in here.stages), default=0)
        + 300
    )


def credentials(wanted: Vllm, here: Here) -> dict[str, bytes]:
    """
    Return the secrets that go to a node, by name: read from this machine's files, or made of them.

    Raises `FleetError` for files that are empty.
    """
    named = secret_files(wanted)
    contents = {name: read(path) for name, path in named.items()}
    if empty := [named[name] for name, content in contents.items() if not content.strip()]:
        raise FleetError(*(f"{path} is empty: put the secret into it" for path in empty))
    return node_credentials(contents, here.stages, here.settings.serving)


def marks(files: Iterable[Checkpoint]) -> tuple[str, ...]:
    """Return the files that say whether each checkpoint is whole."""
    return tuple(sorted({found.mark for found in files}))


@operation()
def built(node: Converge, wanted: Release, goods: Goods | None = None) -> Generator[StringCommand]:
    """Build the release, unless it is there and whole, or comes from another node."""
    if node.snapshot().file(wanted.mark).exists:
        host.noop(f"release {wanted.id} is there")
        return
    if comes(goods):
        host.noop(f"release {wanted.id} comes from another node")
        return
    yield from _building(node, wanted)


@operation()
def built_after_all(node: Converge, wanted: Release, goods: Goods) -> Generator[StringCommand]:
    """Build the release that was to come from another node and did not."""
    if not ctx_state.get().is_executing or node.snapshot().file(wanted.mark).exists:
        host.noop(f"release {wanted.id} is there")
        return
    yield from _building(node, wanted)
    yield StringCommand("rm", "-rf", QuoteString(goods.coming))


def _building(node: Converge, wanted: Release) -> Generator[StringCommand]:
    with progress_watch.building(wanted):
        yield StringCommand("sh", "-c", QuoteString(build_script(wanted)))
    node.forget()


@operation()
def staged_model(
    node: Converge,
    wanted: Checkpoint,
    vllm: Vllm,
    release_directory: str,
    goods: Goods | None = None,
) -> Generator[StringCommand]:
    """Download a model's files, unless they are there and whole, or come from another node."""
    if node.snapshot().file(wanted.mark).exists:
        host.noop(f"{wanted.repository} is there")
        return
    if comes(goods):
        host.noop(f"{wanted.repository} comes from another node")
        return
    yield from _downloading(node, wanted, vllm, release_directory)


@operation()
def staged_after_all(
    node: Converge, wanted: Checkpoint, vllm: Vllm, release_directory: str, goods: Goods
) -> Generator[StringCommand]:
    """Download a model's files that were to come from another node and did not."""
    if not ctx_state.get().is_executing or node.snapshot().file(wanted.mark).exists:
        host.noop(f"{wanted.repository} is there")
        return
    yield from _downloading(node, wanted, vllm, release_directory)
    yield StringCommand("rm", "-rf", QuoteString(goods.coming))


def _downloading(
    node: Converge, wanted: Checkpoint, vllm: Vllm, release_directory: str
) -> Generator[StringCommand]:
    script = model_files.download_script(wanted, vllm, release_directory)
    with progress_watch.downloading(wanted, vllm):
        yield StringCommand("sh", "-c", QuoteString(script))
    node.forget()
