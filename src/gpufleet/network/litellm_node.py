"""
Define the desired state of LiteLLM's node: release, program, configuration, secrets, unit. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import PurePosixPath

from gpufleet import node_paths
from gpufleet.artifacts.release import Release
from gpufleet.converge.desired import (
    UNIT_DIRECTORY,
    Absent,
    DesiredState,
    Directory,
    File,
    Group,
    NoOtherFiles,
    Package,
    Unit,
    UnitGone,
    User,
    Value,
)
from gpufleet.errors import FleetError
from gpufleet.monitoring import certificate_ends, targets
from gpufleet.monitoring.exporters import file_of_node
from gpufleet.network import litellm
from gpufleet.network.litellm import ACCOUNT, CREDENTIALS, HOME, PROGRAM, SERVE, STATE, UNIT
from gpufleet.remote import payload
from gpufleet.serving.unit import UnitFile, whole_unit
from gpufleet.settings.litellm_settings import Litellm
from gpufleet.settings.node_variables import NodeVars

CERTIFICATE = "tls.pem"

PACKAGES = ("ca-certificates", "python3-venv")

# The time limit of a check, which imports all of LiteLLM. Measured: 7 s on a free core, and 33 s on
# busy cores.
CHECK_SECONDS = 180

# The time limit to stop a unit that is removed. The unit may have the longest drain, and needs some
# more seconds.
LONGEST_STOP_SECONDS = 3600 + 30


def required_state(build: Release) -> DesiredState:
    """Return what a node needs before a release is built, and the program that starts a release."""
    values: list[Value] = [
        *map(Package, PACKAGES),
        Group(ACCOUNT),
        User(ACCOUNT, ACCOUNT, STATE),
        *map(Directory, (PROGRAM.home, PROGRAM.releases)),
        *(Directory(f"{PROGRAM.home}/{each}") for each in ("locks", "uv")),
        Directory(str(PurePosixPath(PROGRAM.cache).parent)),
        Directory(str(PurePosixPath(SERVE).parent)),
        Directory(node_paths.CONFIGURATION),
        File(build.lock_path, build.lock),
        File(build.uv_lock_path, build.uv_lock),
        File(SERVE, payload.source("network/litellm_serve").encode(), mode=0o755),
    ]
    return DesiredState(*values)


def read_files(
    wanted: Litellm, nodes: Mapping[str, NodeVars], name: str
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """
    Return LiteLLM's credentials by name, and its public files by their path in `HOME`.

    The function reads the files from this machine. Raises `FleetError` for files that cannot be
    read, and for a key that the gateway does not know.
    """
    secrets: dict[str, bytes] = {}
    others: dict[str, bytes] = {}
    if file := wanted.upstream_key_file:
        secrets |= targets.secrets({"upstream-key": file}, "litellm.upstream_key_file")
        if refusal := litellm.unknown_key(wanted, nodes, name, secrets["upstream-key"].strip()):
            raise FleetError(refusal)
    if file := wanted.upstream_ca_file:
        others |= targets.secrets({"upstream-ca.pem": file}, "litellm.upstream_ca_file")
    if wanted.tls:
        certificate = file_of_node(wanted.tls.certificate_file, name)
        others |= targets.secrets({CERTIFICATE: certificate}, "litellm.tls")
        secrets |= targets.secrets(
            {"tls-key": file_of_node(wanted.tls.key_file, name)}, "litellm.tls"
        )
    return secrets, others


def litellm_unit(
    wanted: Litellm,
    build: Release,
    networks: tuple[str, ...],
    read: Mapping[str, bytes],
    secrets: Mapping[str, bytes],
) -> UnitFile:
    """Return LiteLLM's unit. Its fingerprint covers everything that the process reads."""
    program = payload.source("network/litellm_serve")
    digests = {f"credential {each}": _digest(content) for each, content in secrets.items()}
    return whole_unit(
        "litellm/litellm.service.j2",
        UNIT,
        started_with={"program": program, **read, **digests},
        account=ACCOUNT,
        home=HOME,
        state=STATE,
        release=build.directory,
        serve=SERVE,
        credentials=sorted(secrets),
        networks=networks,
        start_seconds=litellm.START_SECONDS,
        stop_seconds=stop_seconds(wanted),
    )


def command(build: Release, *words: str) -> tuple[str, ...]:
    """Return the command that starts the release."""
    return (f"{build.directory}/bin/python", "-IB", SERVE, *words)


def stop_seconds(wanted: Litellm) -> int:
    """
    Return the time limit in seconds to stop LiteLLM. It includes the drain and Python's shutdown.
    """
    return wanted.drain_seconds + 20


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


OURS = (
    f"{UNIT_DIRECTORY}/{UNIT}",
    f"{HOME}/front.json",
    f"{CREDENTIALS}/upstream-key",
    f"{CREDENTIALS}/tls-key",
    certificate_ends.metrics_file(HOME),
)
"""LiteLLM's files on a node except `config.yaml`: unit, filter, secrets and certificate expiry."""


def absent_state() -> DesiredState:
    """
    Return the desired state of a node without LiteLLM. Releases and the account stay on the node.
    """
    return DesiredState(
        UnitGone(UNIT, stop_seconds=LONGEST_STOP_SECONDS),
        Absent(f"{HOME}/config.yaml"),
        *map(Absent, OURS[1:]),
    )


def litellm_files(
    unit: UnitFile, open_files: Mapping[str, bytes], secrets: Mapping[str, bytes]
) -> DesiredState:
    """
    Return LiteLLM's configuration, credentials and unit.

    Other credentials and other *.pem files are removed. If there is a certificate, a file with its
    expiry is placed beside it.
    """
    pem = open_files.get(CERTIFICATE)
    end = None if pem is None else certificate_ends.certificate_end("litellm.tls", pem)
    return DesiredState(
        Directory(HOME, group=ACCOUNT, mode=0o750),
        Directory(CREDENTIALS, mode=0o700),
        *(
            File(f"{HOME}/{path}", content, group=ACCOUNT, mode=0o640)
            for path, content in open_files.items()
        ),
        NoOtherFiles(f"{HOME}/*.pem"),
        *(
            File(f"{CREDENTIALS}/{path}", content, mode=0o600, secret=True)
            for path, content in secrets.items()
        ),
        NoOtherFiles(f"{CREDENTIALS}/*"),
        *certificate_ends.end_values(HOME, CERTIFICATE, certificate_ends.LITELLM, end),
        # The unit is included because it names the release. A different release may read the same
        # configuration differently.
        unit.file,
    )


def running_unit(wanted: Litellm, unit: UnitFile) -> DesiredState:
    """Return LiteLLM's unit in the running state."""
    return DesiredState(
        unit.file,
        Unit(
            UNIT,
            fingerprint=unit.fingerprint,
            stop_seconds=stop_seconds(wanted),
            start_seconds=litellm.START_SECONDS,
        ),
    )
