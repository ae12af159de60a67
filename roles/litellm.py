"""LiteLLM on a node: its release built and its configuration read by it before it is restarted."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from pathlib import PurePosixPath

from pyinfra import host, logger
from pyinfra.api import QuoteString, StringCommand, deploy, operation
from pyinfra.context import ctx_state

from gpufleet.artifacts import operator_files, release
from gpufleet.artifacts.release import BUILD_SECONDS, WAIT_SECONDS, Release
from gpufleet.converge.desired import (
    UNIT_DIRECTORY,
    Absent,
    Directory,
    File,
    Group,
    Listing,
    NoOtherFiles,
    Package,
    Unit,
    UnitGone,
    User,
    Value,
    Wanted,
)
from gpufleet.errors import FleetError
from gpufleet.monitoring import targets
from gpufleet.monitoring.exporters import named
from gpufleet.monitoring.prometheus import Watched
from gpufleet.network import litellm
from gpufleet.network.litellm import ACCOUNT, CREDENTIALS, HOME, PROGRAM, SERVE, STATE, UNIT
from gpufleet.operations.converge import Converge
from gpufleet.serving import unit as units
from gpufleet.serving.unit import UnitFile
from gpufleet.settings.litellm_settings import Litellm
from gpufleet.templates import read_template
from roles.proven import Configured, proven
from roles.vllm import built

PACKAGES = ("ca-certificates", "python3-venv")
# It imports all of LiteLLM: 7 s of one core measured, and 33 s where others had both.
CHECK_SECONDS = 180
# What has gone may have had the longest drain, and its unit adds a little.
LONGEST_STOP_SECONDS = 3600 + 30


@deploy("LiteLLM")
def proxy(nodes: Mapping[str, Watched], name: str) -> None:
    """
    Converge the node to the LiteLLM that it declares; to none, where it declares none.

    Raises `FleetError` for names that there are not, and files that cannot be read.
    """
    wanted = nodes[name].settings.litellm
    if wanted is None:
        without()
        return
    if problems := [*litellm.problems(wanted, nodes, name)]:
        raise FleetError(*problems)
    build = release.release(
        wanted, operator_files.read(wanted.lock), operator_files.read(wanted.uv_lock), PROGRAM
    )
    secrets, open_files = files(wanted, nodes, name)
    at = litellm.upstream(wanted, nodes, name)
    served = litellm.entries(nodes)
    told = litellm.configuration(wanted, litellm.names(wanted, served), served, at).files
    unit = service(wanted, build, litellm.reach(wanted, at), {**told, **open_files}, secrets)

    ground = Converge(foundation(build), watch=(build.mark,))
    ground.packages(name="packages")
    ground.accounts(name="service account")
    ground.files(name="directories, locks and program")
    built(ground, build, name=f"build release {build.id}", _timeout=BUILD_SECONDS + WAIT_SECONDS)
    values: list[Value] = [
        Directory(HOME, group=ACCOUNT, mode=0o750),
        Directory(CREDENTIALS, mode=0o700),
        *(
            File(f"{HOME}/{path}", content, group=ACCOUNT, mode=0o640)
            for path, content in {**told, **open_files}.items()
        ),
        NoOtherFiles(f"{HOME}/*.pem"),
        *(
            File(f"{CREDENTIALS}/{path}", content, mode=0o600, secret=True)
            for path, content in secrets.items()
        ),
        NoOtherFiles(f"{CREDENTIALS}/*"),
        # It names the release: another one reads the same configuration in its own way.
        unit.file,
    ]
    configuration = Converge(Wanted(*values))
    proven(
        configuration,
        Configured(
            unit=UNIT,
            url="",
            name="litellm",
            directory=HOME,
            check=("/usr/bin/env", "-i", "HOME=.", *command(build, "--check", ".")),
            watched=(),
            files={**told, **open_files},
            seconds=CHECK_SECONDS,
        ),
        name="proof of the configuration",
    )
    configuration.files(name="configuration and unit")
    running = Converge(
        Wanted(
            unit.file,
            Unit(
                UNIT,
                fingerprint=unit.fingerprint,
                stop_seconds=stop_seconds(wanted),
                start_seconds=litellm.START_SECONDS,
            ),
        )
    )
    running.units(name="service")
    kept_only(
        Converge(Wanted(Listing(PROGRAM.releases))),
        build,
        wanted.keep_releases,
        name="older releases",
    )


def without() -> None:
    """Take away what there is of it, but for its releases and its account."""
    secrets = tuple(f"{CREDENTIALS}/{each}" for each in ("upstream-key", "tls-key"))
    ours = (f"{UNIT_DIRECTORY}/{UNIT}", f"{HOME}/front.json", *secrets)
    gone = Converge(
        Wanted(
            UnitGone(UNIT, stop_seconds=LONGEST_STOP_SECONDS),
            Absent(f"{HOME}/config.yaml"),
            *map(Absent, ours[1:]),
        ),
        watch=ours,
    )
    # Also where a run before was killed halfway: no secret stays.
    if any(gone.snapshot().file(each).exists for each in ours):
        gone.units(name="no service")
        gone.files(name="no configuration")


def foundation(build: Release) -> Wanted:
    """Return what a node needs before it can hold a release, and what starts one."""
    values: list[Value] = [
        *map(Package, PACKAGES),
        Group(ACCOUNT),
        User(ACCOUNT, ACCOUNT, STATE),
        *map(Directory, (PROGRAM.home, PROGRAM.releases)),
        *(Directory(f"{PROGRAM.home}/{each}") for each in ("locks", "uv")),
        Directory(str(PurePosixPath(PROGRAM.cache).parent)),
        Directory(str(PurePosixPath(SERVE).parent)),
        Directory("/etc/gpufleet"),
        File(build.lock_path, build.lock),
        File(build.uv_lock_path, build.uv_lock),
        File(SERVE, read_template("litellm-serve.py").encode(), mode=0o755),
    ]
    return Wanted(*values)


def files(
    wanted: Litellm, nodes: Mapping[str, Watched], name: str
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """
    Return what is read of this machine: credentials by name, and open files by path from `HOME`.

    Raises `FleetError` for what cannot be read, and for a key that the gateway does not know.
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
        certificate = named(wanted.tls.certificate_file, name)
        others |= targets.secrets({"tls.pem": certificate}, "litellm.tls")
        secrets |= targets.secrets({"tls-key": named(wanted.tls.key_file, name)}, "litellm.tls")
    return secrets, others


def service(
    wanted: Litellm,
    build: Release,
    networks: tuple[str, ...],
    read: Mapping[str, bytes],
    secrets: Mapping[str, bytes],
) -> UnitFile:
    """Return its unit; the fingerprint covers all that the process reads."""
    program = read_template("litellm-serve.py")
    digests = {f"credential {each}": _digest(content) for each, content in secrets.items()}
    return units.whole(
        "litellm.service.j2",
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
    """Return how long a stop may take: the drain, and what Python needs to end."""
    return wanted.drain_seconds + 20


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@operation()
def kept_only(node: Converge, build: Release, keep: int) -> Generator[StringCommand]:
    """Remove the oldest releases, once the unit runs this one; `keep` others stay."""
    others = sorted(node.snapshot().listing(PROGRAM.releases) - {build.id})
    if len(others) <= keep:
        host.noop(f"{len(others)} older releases")
        return
    executing = ctx_state.get().is_executing
    logger.info(
        "%s%sremove %d of %d older releases below %s",
        *(host.print_prefix, "" if executing else "would "),
        *(len(others) - keep, len(others), PROGRAM.releases),
    )
    # A release's directory is dated when it was whole. With uv's cache, whose files they share by
    # links: otherwise nothing would be free.
    script = f"""set -eu
cd {PROGRAM.releases}
ls -1dt -- {" ".join(others)} | tail -n +{keep + 1} | while read -r old; do
    rm -rf -- "$old" "../locks/$old.txt"
done
rm -rf {PROGRAM.cache}
"""
    yield StringCommand("sh", "-c", QuoteString(script))
    node.forget()
