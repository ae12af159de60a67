"""NVIDIA's apt repository and the CUDA toolkit, pinned and held."""

from __future__ import annotations

from collections.abc import Generator
from shlex import quote

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand, deploy, operation

from gpufleet.converge import Converge
from gpufleet.settings import Cuda, Repository
from gpufleet.wanted import File, Package, Wanted

KEYRING = "/var/lib/gpufleet/cuda-keyring.deb"
PIN = "/etc/apt/preferences.d/gpufleet-cuda.pref"
# 1001: above 1000, so that apt also goes back to the pinned version from a newer one
# (apt_preferences(5)).
PRIORITY = 1001


@deploy("CUDA")
def cuda(wanted: Cuda) -> None:
    """Converge the repository, the pin and the toolkit; with no toolkit, the repository alone."""
    trusted = Converge(Wanted(Package("cuda-keyring")), watch=(KEYRING,))
    keyring(trusted, wanted.repository, name="trust NVIDIA's repository")

    # The pin is in place before apt next runs: apt reads pins when it starts, and a toolkit that
    # is installed in the same run as its pin is not bound by it.
    pins = Converge(Wanted(File(PIN, pin(wanted).encode())))
    pins.files(name="pin the toolkit")

    toolkit = Converge(Wanted(*packages(wanted)))
    toolkit.packages(name="toolkit")


def packages(wanted: Cuda) -> tuple[Package, ...]:
    """Return the toolkit's package: exact, and held, so that no other upgrade takes it along."""
    if wanted.toolkit is None:
        return ()
    return (Package(f"cuda-toolkit-{wanted.toolkit}", wanted.version, hold=True),)


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
            f"set -eu; mkdir -p /var/lib/gpufleet; new={KEYRING}.new; "
            f"curl -fsS --connect-timeout 10 --max-time 120 -o $new {quote(url)}; "
            f"echo {repository.keyring_sha256}'  '$new | sha256sum -c --status "
            f"|| {{ echo {quote(said)} >&2; rm -f $new; exit 1; }}; "
            f"DEBIAN_FRONTEND=noninteractive dpkg --force-confnew -i $new >/dev/null; "
            f"apt-get -qq -o DPkg::Lock::Timeout=300 update; "
            f"mv -f $new {KEYRING}"
        ),
    )
    node.forget()
