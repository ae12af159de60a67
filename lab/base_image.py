"""Build the root filesystem from which all nodes start: a bare Debian with systemd and sshd.

It is like a newly delivered machine, without gpufleet, GPU or key. The node's own layer has the
parts of a lab node (hosts, key, simulated GPU), and this layer is shared and read-only.

It is built once per recipe, in a directory with a temporary name that is renamed when complete, so
that a killed build leaves no false image.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

from gpufleet.errors import FleetError
from lab import run_command
from lab.packages import ensure_packages, requirements
from lab.progress import Say, silent, step
from lab.state import CACHE, exclusive

__all__ = ["Recipe", "build", "ensure_packages", "recipe", "requirements"]

SUITE = "bookworm"

# A server needs systemd and sshd. The other packages (python3, sudo, curl, ip ...) are on any
# Debian server, or pyinfra's facts call their programs.
PACKAGES = (
    "ca-certificates", "curl", "dbus", "gnupg", "iproute2", "iputils-ping", "kmod",
    "libpam-systemd", "openssh-server", "pciutils", "procps", "python3",
    "python3-venv", "sudo", "systemd", "systemd-sysv",
)  # fmt: skip

# No node needs these files, which would be half of the image.
EXCLUDED = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")

# Timers that would download at a time of their own choosing, and an unused terminal.
MASKED = (
    "apt-daily-upgrade.timer", "apt-daily.timer", "console-getty.service",
    "e2scrub_all.timer", "e2scrub_reap.service", "systemd-timesyncd.service",
)  # fmt: skip

# The parts of this machine's apt configuration that nodes get too. Proxies are not among them,
# because a node's only proxy is the lab's.
_COPIED_OPTIONS = ("Acquire::Check-", "Acquire::Languages", "Acquire::Retries")
_PROXY_OPTIONS = ("Acquire::http::", "Acquire::https::")

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines an image; equal recipes give the same image."""

    sources: tuple[str, ...]  # lines of apt's sources.list
    options: tuple[str, ...]  # lines of apt.conf
    packages: tuple[str, ...] = PACKAGES
    excluded: tuple[str, ...] = EXCLUDED
    masked: tuple[str, ...] = MASKED
    version: int = 1  # increase this number if `_finish` changes

    @property
    def path(self) -> Path:
        """Return the path of the built image, for example `.../images/bookworm-0f3c9a2b41d7`."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        return CACHE / "images" / f"{SUITE}-{digest[:12]}"


def build(say: Say = silent, also: Iterable[str] = ()) -> Path:
    """
    Return the base image's directory, building the image if it does not exist.

    `also` has additional packages. A build takes about 30 s and 230 MB. The image must not be
    changed, because nodes' layers lie on top.
    """
    wanted = recipe()
    wanted = replace(wanted, packages=tuple(sorted({*wanted.packages, *also})))
    if wanted.path.is_dir():
        return wanted.path
    with exclusive("images", CACHE, limit=900):
        if not wanted.path.is_dir():  # else another lab has built it while we waited
            with step(f"build the base image ({SUITE}, {len(wanted.packages)} packages)", say):
                _build(wanted)
    return wanted.path


@cache  # takes apt half a second
def recipe() -> Recipe:
    """
    Return the recipe from this machine's apt configuration.

    Raises `FleetError` if apt has no Debian archive of the image's suite.
    """
    return Recipe(tuple(_sources()), tuple(_options(_COPIED_OPTIONS)))


def archive_hosts() -> list[str]:
    """Return the host names of the image's package sources, for the nodes' proxy."""
    uris = (line.split()[2] for line in recipe().sources)
    return sorted({uri.split("//", 1)[-1].split("/")[0].split(":")[0] for uri in uris})


def _sources() -> list[str]:
    """Return the Debian archives of `SUITE` from apt's own configuration, as sources.list lines."""
    archives = _archives()
    if not archives:  # a fresh machine's apt has no lists, and so no origins
        run_command.run("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "update", limit=600)
        archives = _archives()
    if not any(release == SUITE for release, _, _ in archives):
        raise FleetError(
            f"apt on this machine has no Debian archive of {SUITE}, the system of the lab's nodes: "
            "run `apt-get update`; if the machine is not Debian, add a source for it in "
            f"/etc/apt/sources.list.d with Suites: {SUITE} and Signed-By: {_KEYRING}."
        )
    return [
        f"deb [signed-by={_KEYRING}] {uri} {release} {' '.join(part for _, _, part in parts)}"
        for (release, uri), parts in groupby(archives, key=lambda entry: entry[:2])
    ]


def _archives() -> list[tuple[str, str, str]]:
    """Return (release, address, component) of every Debian archive of `SUITE` that apt knows."""
    form = "$(ORIGIN)|$(RELEASE)|$(REPO_URI)|$(COMPONENT)"
    listed = run_command.run("apt-get", "indextargets", "--format", form, "Created-By: Packages")
    suites = {SUITE, f"{SUITE}-updates", f"{SUITE}-security"}
    # Third parties name their suites after Debian's too: what tells them apart is the Origin that
    # the archive's signed Release file states.
    entries = (line.split("|") for line in sorted(set(listed.splitlines())))
    return [
        (release, uri, part)
        for origin, release, uri, part in entries
        if origin == "Debian" and release in suites
    ]


def _options(prefixes: tuple[str, ...]) -> list[str]:
    """Return the machine's apt options that begin with one of `prefixes` and have a value."""
    dump = run_command.run("apt-config", "dump").splitlines()
    return [line for line in dump if line.startswith(prefixes) and not line.endswith(' "";')]


def _build(wanted: Recipe) -> None:
    images = wanted.path.parent
    images.mkdir(mode=0o700, parents=True, exist_ok=True)  # setuid programs inside: root only
    for stale in images.glob("*.new"):  # remains of a killed build; this process holds the lock
        shutil.rmtree(stale)
    draft = wanted.path.with_suffix(".new")
    draft.mkdir()
    _bootstrap(wanted, draft)
    _finish(wanted, draft)
    draft.rename(wanted.path)


def _bootstrap(wanted: Recipe, root: Path) -> None:
    options = [*wanted.options, *_options(_PROXY_OPTIONS), 'APT::Install-Recommends "false";']
    run_command.run(
        # mmdebstrap starts many processes: they live in a PID namespace whose first process dies
        # with this one, so a killed build leaves none behind, and no mounts either.
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", "--fork", "--pid", "--kill-child", "--mount-proc", "--"),
        *("mmdebstrap", "--mode=root", "--variant=minbase", "--quiet"),
        f"--include={','.join(wanted.packages)}",
        *(f"--aptopt={option}" for option in options),
        *(f"--dpkgopt=path-exclude={path}" for path in wanted.excluded),
        SUITE,
        root,
        *wanted.sources,
        limit=900,  # 30 s measured; a slow mirror takes minutes
    )


def _finish(wanted: Recipe, root: Path) -> None:
    """Prepare the tree for a first boot: no identity, no secrets, no own timers."""
    (root / "etc/apt/apt.conf.d/99mmdebstrap").unlink()  # holds this machine's proxy
    options = "\n".join([*wanted.options, 'APT::Install-Recommends "false";'])
    (root / "etc/apt/apt.conf.d/10machine").write_text(options + "\n")
    for key in root.glob("etc/ssh/ssh_host_*"):
        key.unlink()
    (root / "etc/machine-id").write_text("")
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/resolv.conf").write_text("")  # no name service: /etc/hosts is all there is
    for unit in wanted.masked:
        mask = root / "etc/systemd/system" / unit
        mask.unlink(missing_ok=True)
        mask.symlink_to("/dev/null")
    os.sync()  # a power cut after the rename must not leave an image of empty files
