"""Compute the desired state of a node with stages: packages, directories, secrets and units.

Pure, except that this module reads the operator's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpufleet import node_paths
from gpufleet.artifacts.model_files import AdapterCopy, Checkpoint
from gpufleet.artifacts.operator_files import read, release_of
from gpufleet.artifacts.release import Release
from gpufleet.converge.desired import (
    DesiredState,
    Directory,
    File,
    Group,
    NoOtherFiles,
    NoOtherUnits,
    Package,
    Unit,
    User,
    Value,
)
from gpufleet.engines.engine import engine
from gpufleet.errors import FleetError
from gpufleet.on_node.common.stage_units import GLOB
from gpufleet.planning.gpu_shares import start_seconds
from gpufleet.planning.stage import Stage, served_name
from gpufleet.remote import payload
from gpufleet.serving import flag_check, unit
from gpufleet.serving.credentials import (
    API_KEY,
    API_KEY_FILE,
    CREDENTIALS,
    HF_TOKEN,
    NOT_FOR_UNITS,
    VARIABLE,
    node_credentials,
    secret_files,
    unit_hashes,
)
from gpufleet.serving.flag_check import LaunchCommand
from gpufleet.serving.readiness import Endpoint
from gpufleet.serving.unit import UnitFile
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import EngineSettings
from gpufleet.templates import TEMPLATES, read_template

# Time in which a unit that is no longer wanted must stop: the longest drain that
# settings/node_settings.py allows, and the half minute that the unit adds.
LONGEST_STOP_SECONDS = 3600 + 30

# Linux takes 128 KiB for a variable with its name (MAX_ARG_STRLEN).
_LONGEST_VARIABLE = 120_000

# libnuma: vLLM binds processes to memory nodes with it. vLLM's CPU build does not load without it
# (measured). Compiler and Python's headers: Triton, FlashInfer and torch's inductor compile kernels
# at the first requests. If one is missing, the engine starts and is healthy, but dies at the first
# request (measured).
PACKAGES = ("ca-certificates", "curl", "g++", "libnuma1", "python3-dev", "python3-venv")

# Secrets that go over the wire as the value of a header.
_ONE_LINE = frozenset({API_KEY, HF_TOKEN})

# os-release's ID of systems that have no apt.
_WITHOUT_APT = frozenset(
    {"almalinux", "amzn", "centos", "fedora", "ol", "opensuse-leap", "rhel", "rocky", "sles"}
)


def system_problems(
    documents: Mapping[str, Mapping[str, Any]], settings: Mapping[str, NodeSettings]
) -> Iterator[str]:
    """Yield a sentence for each node whose system lacks the packages for serving."""
    for name, document in sorted(documents.items()):
        system = document["os_release"].get("id")
        if settings[name].serving and isinstance(system, str) and system in _WITHOUT_APT:
            version = document["os_release"].get("version_id")
            yield (
                f"{name}: the node runs {system} {version}, but deploys/vllm.py installs packages "
                f"of Debian and Ubuntu ({', '.join(PACKAGES)}). deploys/node.py can provision this "
                "node, but the node cannot serve: install Debian 12 or newer or Ubuntu 22.04 or "
                "newer on it, or remove `serving` from its variables"
            )


def required_state(
    wanted: EngineSettings,
    builds: Iterable[Release],
    secrets: Mapping[str, bytes],
    *,
    apart: bool = False,
) -> DesiredState:
    """
    Return the desired state that a node needs before its releases are installed.

    If `apart` is true, the files that units read at their start are left out.
    """
    user, every = wanted.user, tuple(builds)
    used = {name: each for name, each in secrets.items() if name in NOT_FOR_UNITS}
    return DesiredState(
        *(Package(name) for name in PACKAGES),
        Group(user),
        User(user, group=user, home=node_paths.VLLM_STATE),
        *(
            Directory(path, mode=0o755)
            for path in (
                node_paths.VLLM,
                node_paths.RELEASES,
                f"{node_paths.VLLM}/locks",
                f"{node_paths.VLLM}/uv",
            )
        ),
        Directory(node_paths.CACHE, mode=0o755),
        Directory(node_paths.VLLM_STATE, mode=0o755),
        Directory(node_paths.MODELS, mode=0o755),
        Directory(node_paths.VLLM_CONFIGURATION, mode=0o755),
        Directory(CREDENTIALS, mode=0o700),
        Directory(node_paths.PROGRAMS, mode=0o755),
        Directory(node_paths.GUARD, mode=0o755),
        *(
            File(path, content)
            for build in every
            for path, content in (
                (build.lock_path, build.lock),
                (build.uv_lock_path, build.uv_lock),
            )
        ),
        *(_secret(name, content) for name, content in used.items()),
        *(() if apart else restart_files(secrets, [each.program.package for each in every])),
    )


def restart_files(secrets: Mapping[str, bytes], engines: Iterable[str]) -> tuple[File, ...]:
    """
    Return the files that units read at their start. The units' fingerprints cover these files.

    `engines` are the names of the engines with a release on the node.
    """
    has_variables = any(name.startswith(f"{VARIABLE}.") for name in secrets)
    variables = File(unit.VARIABLES, read_template("vllm/vllm-variables.sh").encode(), mode=0o755)
    return (
        *(
            File(launcher.path, launcher.content(TEMPLATES), mode=0o755)
            for launcher in (engine(name).launcher for name in engines)
        ),
        *([variables] if has_variables else []),
        File(unit.RANK, payload.archive("rank/rank"), mode=0o755),
        File(unit.GUARD, payload.source("serving/guard").encode()),
        File(node_paths.GPU_TURN, payload.archive(unit.GPU_TURN_PROGRAM), mode=0o755),
        *(_secret(name, each) for name, each in secrets.items() if name not in NOT_FOR_UNITS),
    )


def _secret(name: str, content: bytes) -> File:
    return File(f"{CREDENTIALS}/{name}", content, mode=0o600, secret=True)


def unit_files(
    stages: Iterable[Stage],
    settings: NodeSettings,
    builds: Mapping[str, Release],
    secrets: Mapping[str, bytes],
) -> dict[Stage, UnitFile]:
    """Return the units of this node's stages, by stage. `builds` are the engines' releases."""
    return {
        stage: unit.render_unit(
            stage,
            settings.serving[stage.model],
            settings.engine_of(stage.model),
            release=builds[settings.serving[stage.model].engine].id,
            toolkit=settings.cuda.toolkit if settings.cuda else None,
            credentials=unit_hashes(stage, settings.serving[stage.model], secrets),
        )
        for stage in stages
    }


def launch_commands(
    stages: Iterable[Stage], settings: NodeSettings, build: Release
) -> tuple[LaunchCommand, ...]:
    """Return the command lines and variables of this node's stages that `build` runs."""
    return tuple(
        flag_check.launch_command(
            stage,
            settings.serving[stage.model],
            settings.engine_of(stage.model),
            release=build.id,
            toolkit=settings.cuda.toolkit if settings.cuda else None,
        )
        for stage in stages
        if settings.serving[stage.model].engine == build.program.package
    )


def services(rendered: Mapping[Stage, UnitFile], settings: NodeSettings) -> DesiredState:
    """Return the desired state with the planned stages' units, which removes all other stages."""
    values: list[Value] = [NoOtherUnits(GLOB, stop_seconds=LONGEST_STOP_SECONDS)]
    for stage, file in rendered.items():
        model = settings.serving[stage.model]
        values += [
            file.file,
            Unit(
                stage.unit,
                fingerprint=file.fingerprint,
                stop_seconds=unit.stop_seconds(model),
            ),
        ]
    return DesiredState(*values)


def endpoints(rendered: Mapping[Stage, UnitFile], settings: NodeSettings) -> tuple[Endpoint, ...]:
    """Return the endpoints of this node's servers, at the node's local addresses."""
    wanted = settings.servers
    if wanted is None:
        return ()
    return tuple(
        Endpoint(
            id=stage.id if port == stage.port else f"{stage.id} on port {port}",
            unit=stage.unit,
            url=f"http://{unit.local_address(wanted.listen)}:{port}",
            served_name=served_name(stage, settings.serving[stage.model]),
            key_file=API_KEY_FILE if wanted.api_key_file else None,
            start_seconds=_start_seconds(stage, rendered, settings),
            fingerprint=file.fingerprint,
            peers=tuple(node for node in stage.nodes if node != stage.node),
            adapters=stage.adapters,
        )
        for stage, file in rendered.items()
        for port in stage.servers
    )


def _start_seconds(stage: Stage, stages: Iterable[Stage], settings: NodeSettings) -> int:
    """
    Return the start deadline of a stage in seconds. On a shared GPU, the stage may start last.
    """
    together = [each for each in stages if each.gpus == stage.gpus] if stage.gpu_share else [stage]
    return start_seconds(settings.serving[each.model] for each in together)


def wait_seconds(stages: Iterable[Stage], settings: NodeSettings) -> int:
    """Return the time limit in seconds for the wait for all endpoints."""
    every = tuple(stages)
    return max((_start_seconds(stage, every, settings) for stage in every), default=0) + 300


def mark_files(files: Iterable[Checkpoint | AdapterCopy]) -> tuple[str, ...]:
    """Return the mark files of complete checkpoints and adapter copies."""
    return tuple(sorted({found.mark for found in files}))


def credentials(stages: Iterable[Stage], settings: NodeSettings) -> dict[str, bytes]:
    """
    Return a node's secrets by name, read from this machine's files or derived from them.

    Raises `FleetError` for unreadable or empty files, and for values that a header or variable
    cannot have.
    """
    contents, problems = _secrets(settings)
    if problems:
        raise FleetError(*problems)
    return node_credentials(contents, stages, settings.serving)


def file_problems(settings: NodeSettings, *, secrets: bool = True) -> tuple[str, ...]:
    """Return the problems of a node's lock files and, if `secrets` is true, of its secret files."""
    if not settings.serving:
        return ()
    problems: list[str] = []
    for engine_settings in settings.used_engines:
        try:
            release_of(engine_settings)
        except FleetError as error:
            problems += error.problems
    if secrets:
        problems += _secrets(settings)[1]
    return tuple(problems)


def _secrets(settings: NodeSettings) -> tuple[dict[str, bytes], list[str]]:
    """Return the contents of the secret files by credential, and their problems."""
    contents: dict[str, bytes] = {}
    problems: list[str] = []
    named = secret_files(settings.servers, settings.serving) if settings.servers else {}
    for name, path in named.items():
        try:
            content = contents[name] = read(path)
        except FleetError as error:
            problems += error.problems
            continue
        if not content.strip():
            problems.append(f"{path} is empty: write the secret into it")
        elif name in _ONE_LINE and any(byte < 0x20 or byte > 0x7E for byte in content.strip()):
            problems.append(
                f"{path} has more than one line, or characters that an HTTP header cannot contain, "
                "so clients could not send it as a key: write one line of ASCII into the file, for "
                "example the output of `openssl rand -hex 32`"
            )
        elif name.startswith(f"{VARIABLE}.") and (
            b"\0" in content or len(content) > _LONGEST_VARIABLE
        ):
            problems.append(
                f"{path} has {len(content):,} bytes or contains a NUL, but the value of a variable "
                f"may have at most {_LONGEST_VARIABLE:,} bytes and no NUL: write such a text into "
                "the file"
            )
    return contents, list(dict.fromkeys(problems))


def no_serving() -> DesiredState:
    """Return the desired state of a node without stages."""
    return DesiredState(NoOtherUnits(GLOB, stop_seconds=LONGEST_STOP_SECONDS))


def only_these_credentials(secrets: Mapping[str, bytes]) -> DesiredState:
    """Return the desired state with a node's secrets, which removes all other credentials."""
    return DesiredState(
        *(_secret(name, content) for name, content in secrets.items()),
        NoOtherFiles(f"{CREDENTIALS}/*"),
    )
