"""A system in a folder with a package database of its own, and signed repositories for it.

The programs are the machine's apt, dpkg, dnf and rpm; nothing is installed on the machine. Whoever
changes packages in such a folder has to be root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpufleet.converge import package_commands
from gpufleet.converge.package_commands import Plan
from gpufleet.remote import payload
from lab.vendor import repository
from lab.vendor.deb import File, Package

KEY = "/etc/gpufleet/keys/vendor.gpg"


@dataclass(frozen=True)
class Run:
    """What a transaction said."""

    status: int
    out: str
    err: str

    @property
    def changed(self) -> list[list[str | None]]:
        """[name, before, after] of each package that changed."""
        assert self.status == 0, self.err
        found: list[list[str | None]] = json.loads(self.out.splitlines()[-1])["changed"]
        return sorted(found, key=str)


def transact(plan: Plan, root: Path, *, lock_seconds: int = 5) -> Run:
    """Run a plan's transaction in a folder, by the program that nodes get."""
    asked = package_commands.parameters(replace(plan, root=str(root)))
    program = payload.program("packages/transaction", **{**asked, "lock_seconds": lock_seconds})
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=program.encode(),
        capture_output=True,
        check=False,
    )
    return Run(done.returncode, done.stdout.decode(), done.stderr.decode())


@dataclass
class Debian:
    """
    A folder with dpkg's database, a distribution's repository and a vendor's, both signed.

    Attributes:
        home: everything lies below it.
        keys: where the signing keys of both are kept.
    """

    home: Path
    keys: Path
    packages: dict[str, list[Package]] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The system."""
        return self.home / "root"

    def url(self, name: str) -> str:
        """The address of a repository."""
        return f"file:{self.home / name}"

    def make(self) -> Debian:
        """Make the system and both repositories, which are empty."""
        for folder in ("updates", "info", "triggers"):
            (self.root / "var/lib/dpkg" / folder).mkdir(parents=True)
        for name in ("status", "available"):
            (self.root / "var/lib/dpkg" / name).touch()
        for folder in ("etc/apt/sources.list.d", "etc/apt/preferences.d", "tmp", "usr"):
            (self.root / folder).mkdir(parents=True)
        for name, path in (("vendor", KEY), ("host", "/usr/share/keyrings/host.gpg")):
            key = self.root / path.lstrip("/")
            key.parent.mkdir(parents=True, exist_ok=True)
            key.write_bytes(repository.public_key(self.keys / name))
            self.publish(name)
        keyring = self.root / "usr/share/keyrings/host.gpg"
        (self.root / "etc/apt/sources.list").write_text(
            f"deb [signed-by={keyring}] {self.url('host')} /\n"
        )
        return self

    def publish(self, name: str, *packages: Package) -> None:
        """Add packages to a repository and sign its index anew."""
        pool = self.home / name
        pool.mkdir(exist_ok=True)
        for package in packages:
            package.build(pool)
        # apt tells sources apart by origin and label.
        said = {"origin": "Debian", "label": "Debian"} if name == "host" else {}
        repository.index(pool, self.keys / name, **said)

    def dpkg(self, *arguments: str, check: bool = True) -> str:
        """Run dpkg on the system; return what it prints."""
        done = subprocess.run(
            ["dpkg", f"--root={self.root}", "--force-script-chrootless", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, str]:
        """Return {name: "ii 1.0-1"} of every package, by dpkg-query."""
        done = subprocess.run(
            [
                *("dpkg-query", "--admindir", str(self.root / "var/lib/dpkg"), "-W"),
                *("-f", "${Package} ${db:Status-Abbrev}${Version}\n"),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        rows = (row.partition(" ") for row in done.stdout.splitlines())
        return {name: status for name, _, status in rows}


def deb(
    name: str,
    version: str,
    *,
    depends: str = "",
    conflicts: str = "",
    scripts: Mapping[str, str] | None = None,
    kib: int = 0,
) -> Package:
    """Return a small package; `kib` of content that does not compress."""
    fields = {"Depends": depends, "Conflicts": conflicts, "Replaces": conflicts}
    files = {f"/opt/{name}/version": File(version)}
    if kib:
        files[f"/opt/{name}/weight"] = File(os.urandom(kib << 10))
    return Package(
        name,
        version,
        "all",
        fields={key: value for key, value in fields.items() if value},
        files=files,
        scripts=scripts or {},
    )


def document(run: Run) -> dict[str, Any]:
    """Return the whole document of a run that went well."""
    assert run.status == 0, run.err
    found: dict[str, Any] = json.loads(run.out.splitlines()[-1])
    return found
