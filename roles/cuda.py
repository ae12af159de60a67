"""NVIDIA's apt repository and the CUDA toolkit, pinned and held."""

from __future__ import annotations

from collections.abc import Generator
from shlex import quote

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand, deploy, operation

from gpufleet.converge import Converge
from gpufleet.settings import Cuda, Repository
from gpufleet.wanted import Directory, File, NoOtherFiles, Package, Wanted

KEYRING = "/var/lib/gpufleet/cuda-keyring.deb"
# What the keyring package installs (its name is the same for every distribution's repository).
KEY = "/usr/share/keyrings/cuda-archive-keyring.gpg"
SOURCE = "/etc/apt/sources.list.d/gpufleet-cuda.sources"
# The source that the keyring package brings: the vendor's own address, whatever mirror is set.
PACKAGED_SOURCES = "/etc/apt/sources.list.d/cuda-*.list"
# The first record that matches a package decides, in the order of file names: ours has to come
# before the catch-all that the keyring package brings (cuda-repository-pin-600).
PIN = "/etc/apt/preferences.d/00-gpufleet-cuda.pref"
# 1001: above 1000, so that apt also goes back to the pinned version from a newer one
# (apt_preferences(5)).
PRIORITY = 1001
# Another apt or dpkg is waited for (apt.conf(5), DPkg::Lock::Timeout), then the install itself.
KEYRING_SECONDS = 600


@deploy("CUDA")
def cuda(wanted: Cuda) -> None:
    """Converge the repository, the pin and the toolkit; with no toolkit, the repository alone."""
    tools = Converge(Wanted(Package("ca-certificates"), Package("curl")))
    tools.packages(name="download tools")

    trusted = Converge(Wanted(Package("cuda-keyring")), watch=(KEYRING,))
    keyring(
        trusted,
        wanted.repository,
        name="trust NVIDIA's repository",
        _timeout=KEYRING_SECONDS,
    )

    # The pin is in place before apt next runs: apt reads pins when it starts, and a toolkit that
    # is installed in the same run as its pin is not bound by it.
    sources = Converge(
        Wanted(
            Directory("/var/lib/gpufleet"),
            File(PIN, pin(wanted).encode()),
            File(SOURCE, source(wanted.repository).encode()),
            NoOtherFiles(PACKAGED_SOURCES),
        )
    )
    sources.files(name="source and pin")

    toolkit = Converge(Wanted(*packages(wanted)))
    toolkit.packages(name="toolkit")


def packages(wanted: Cuda) -> tuple[Package, ...]:
    """Return the toolkit's package: exact, and held, so that no other upgrade takes it along."""
    if wanted.toolkit is None:
        return ()
    return (Package(f"cuda-toolkit-{wanted.toolkit}", wanted.version, hold=True),)


def source(repository: Repository) -> str:
    """Return the apt source: the vendor's or a mirror's, held to the vendor's key either way."""
    return (
        "# Written by gpufleet: cuda.repository.url in group_vars.\n"
        f"Types: deb\nURIs: {repository.url}/\nSuites: /\nSigned-By: {KEY}\n"
    )


def pin(wanted: Cuda) -> str:
    """
    Return our apt preferences.

    Only what we install is pinned: the vendor's own catch-all pin outranks the distribution's
    driver packages and mixes the two packagings, so it is narrowed to packages we name.
    """
    lines = [
        "# Written by gpufleet.",
        "# NVIDIA's keyring package prefers its repository for every package name; that would",
        "# mix the distribution's driver packages with NVIDIA's. Here it is an ordinary source.",
        "Package: *",
        "Pin: release l=NVIDIA CUDA",
        "Pin-Priority: 500",
        "",
    ]
    for package in packages(wanted):
        lines += [
            f"Package: {package.name}",
            f"Pin: version {package.version}",
            f"Pin-Priority: {PRIORITY}",
            "",
        ]
    return "\n".join(lines)


@operation()
def keyring(node: Converge, repository: Repository) -> Generator[StringCommand]:
    """
    Install the repository's keyring package, downloaded anew only when its hash is another.

    The hash is the trust anchor: a mirror that serves another keyring is refused.
    """
    there = node.snapshot().file(KEYRING)
    if there.sha256 == repository.keyring_sha256 and node.snapshot().package("cuda-keyring"):
        host.noop("NVIDIA's repository is trusted")
        return
    url = f"{repository.url}/{repository.keyring}"
    said = (
        f"the keyring package at {url} is not the one that cuda.repository.keyring_sha256 names; "
        "nothing was installed. Compare it with the vendor's, then correct the setting"
    )
    yield StringCommand(
        "sh",
        "-c",
        QuoteString(
            "set -eu; umask 022; mkdir -p /var/lib/gpufleet; "
            f"new={KEYRING.removesuffix('.deb')}.new.deb; "
            f"curl -fsS --connect-timeout 10 --max-time 120 -o $new {quote(url)}; "
            f"echo {repository.keyring_sha256}'  '$new | sha256sum -c --status "
            f"|| {{ echo {quote(said)} >&2; rm -f $new; exit 1; }}; "
            # apt, not dpkg: it waits for whoever holds the lock.
            "DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 "
            "-o Dpkg::Options::=--force-confnew --allow-downgrades --reinstall install $new "
            ">/dev/null; "
            f"sync $new; mv -f $new {KEYRING}"
        ),
    )
