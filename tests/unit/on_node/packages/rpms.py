"""An rpm system in a folder, and a signed repository for it, by the machine's dnf and rpmbuild."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab import packages

KEY = "/etc/gpufleet/keys/vendor.asc"
TOOLS = ("dnf", "rpm", "rpmbuild", "rpmsign", "createrepo_c", "gpg")
# Debian package -> which of them it has. Debian's dnf and rpm are the real ones.
NEEDED = {
    "createrepo-c": "createrepo_c",
    "dnf": "dnf",
    "dnf-plugins-core": "dnf versionlock",
    "gnupg": "gpg",
    "rpm": "rpm, rpmbuild, rpmsign",
}


def provide() -> None:
    """Install what this machine lacks of them; raises `FleetError` where that cannot be."""
    if shutil.which("apt-get") or not all(map(shutil.which, TOOLS)):
        packages.ensure_packages(needed=NEEDED)


@dataclass
class RedHat:
    """A folder with an rpm database, and a vendor's repository of which all is signed."""

    home: Path
    gnupg: Path

    @property
    def root(self) -> Path:
        """The system."""
        return self.home / "root"

    @property
    def url(self) -> str:
        """The address of the vendor's repository."""
        return f"file://{self.home / 'vendor'}"

    def make(self) -> RedHat:
        """Make the system and an empty repository."""
        plugins = self.root / "etc/dnf/plugins"
        for folder in (plugins, self.root / "etc/yum.repos.d", self.root / "usr"):
            folder.mkdir(parents=True)
        locks = plugins / "versionlock.list"
        locks.write_text("\n")
        (plugins / "versionlock.conf").write_text(f"[main]\nenabled=1\nlocklist={locks}\n")
        for plugin in ("local", "debuginfo-install", "copr"):
            (plugins / f"{plugin}.conf").write_text("[main]\nenabled=0\n")
        if not any(self.gnupg.iterdir()):
            self.gnupg.chmod(0o700)
            self.gpg("--passphrase=", "--quick-gen-key", "vendor <v@x.invalid>", "rsa3072")
        key = self.root / KEY.lstrip("/")
        key.parent.mkdir(parents=True)
        key.write_bytes(self.gpg("--armor", "--export"))
        return self

    def publish(self, *specs: str) -> None:
        """Build packages, sign each and the index."""
        pool, build = self.home / "vendor", self.home / "build"
        pool.mkdir(exist_ok=True)
        for number, spec in enumerate(specs):
            path = build / f"{number}.spec"
            path.parent.mkdir(exist_ok=True)
            path.write_text(spec)
            self._run("rpmbuild", "-bb", *self._define(_topdir=build, _rpmdir=pool), str(path))
        files = sorted(str(path) for path in pool.rglob("*.rpm"))
        self._run(
            "rpmsign",
            *self._define(_gpg_name="vendor", __gpg=shutil.which("gpg")),
            "--addsign",
            *files,
        )
        self._run("createrepo_c", "-q", str(pool))
        self.sign()

    def sign(self) -> None:
        """Sign the index."""
        index = self.home / "vendor/repodata/repomd.xml"
        index.with_name("repomd.xml.asc").unlink(missing_ok=True)
        self.gpg("--armor", "--detach-sign", str(index))

    def gpg(self, *arguments: str) -> bytes:
        """Run GnuPG with the vendor's keyring."""
        return self._run("gpg", "--batch", "--quiet", "--no-tty", *arguments)

    def versions(self) -> dict[str, str]:
        """Return {name: version-release} of every package, by rpm."""
        form = "%{NAME} %{VERSION}-%{RELEASE}\n"
        text = self._run("rpm", "--root", str(self.root), "-qa", "--qf", form).decode()
        rows = (row.split(" ") for row in text.splitlines())
        return {row[0]: row[1] for row in rows if row[0] != "gpg-pubkey"}

    def locks(self) -> list[str]:
        """Return what dnf's versionlock holds."""
        text = (self.root / "etc/dnf/plugins/versionlock.list").read_text()
        return sorted(line for line in text.splitlines() if line and not line.startswith("#"))

    def _define(self, **values: object) -> list[str]:
        return [w for key, value in values.items() for w in ("--define", f"{key} {value}")]

    def _run(self, *argv: str) -> bytes:
        done = subprocess.run(
            argv,
            capture_output=True,
            check=False,
            env={**os.environ, "GNUPGHOME": str(self.gnupg)},
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout


def spec(
    name: str, version: str, *, requires: str = "", scripts: Mapping[str, str] | None = None
) -> str:
    """Return a package without files, as NVIDIA's with an epoch."""
    lines = [
        f"Name: {name}",
        "Epoch: 3",
        f"Version: {version}",
        "Release: 1.el9",
        "Summary: stand-in",
        "License: none",
        "BuildArch: noarch",
        *([f"Requires: {requires}"] if requires else []),
        "%description\nstand-in",
    ]
    # A script in rpm's own Lua: a folder has no shell.
    lines += [f"%{when} -p <lua>\n{text}" for when, text in (scripts or {}).items()]
    return "\n".join([*lines, "%files", ""])
