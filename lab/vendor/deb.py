"""Define Debian packages as values, and build equal bytes from equal values.

Contract: with the same dpkg and zlib, every build of a `Package` has the same SHA-256, on any day
and with any umask. So an operator can pin the keyring package by its hash.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The date of every file in every package, seconds since 1970: 1 January 2026.
EPOCH = 1_767_225_600
_BUILD_S = 60.0


@dataclass(frozen=True)
class File:
    """A file that a package installs; an administrator's changes of conffiles are kept."""

    content: str | bytes
    mode: int = 0o644
    conffile: bool = False


@dataclass(frozen=True)
class Package:
    """One binary package.

    Attributes:
        fields: further control fields, such as Depends.
        files: the installed files, by absolute path.
        scripts: maintainer scripts by name (postinst, prerm ...), as shell lines.
    """

    name: str
    version: str
    architecture: str = "amd64"
    fields: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)

    @property
    def control(self) -> str:
        """Return the control file in dpkg's form."""
        fields = {
            "Package": self.name,
            "Version": self.version,
            "Architecture": self.architecture,
            "Maintainer": "gpufleet lab <lab@example.invalid>",
            "Section": "multiverse/devel",
            "Priority": "optional",
            **self.fields,
            "Description": f"stand-in for NVIDIA's {self.name}, for rehearsals only",
        }
        return "".join(f"{name}: {value}\n" for name, value in fields.items())

    def build(self, into: Path) -> Path:
        """Write the package to the folder `into` with dpkg's file name, and return its path."""
        with tempfile.TemporaryDirectory(prefix="gpufleet-deb-") as staging:
            root = Path(staging) / "root"
            self._stage(root)
            subprocess.run(
                # gzip: xz may cut its blocks by the number of processors
                ["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", str(root), str(into)],
                env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)},
                check=True,
                capture_output=True,
                timeout=_BUILD_S,
            )
        return self.path(into)

    def path(self, folder: Path) -> Path:
        """Return the path of the built package in a folder."""
        # A version's epoch ("1:") is never part of a file's name
        version = self.version.rpartition(":")[2]
        return folder / f"{self.name}_{version}_{self.architecture}.deb"

    def _stage(self, root: Path) -> None:
        conffiles = [path for path, file in self.files.items() if file.conffile]
        control = {"control": File(self.control)}
        if conffiles:
            control["conffiles"] = File("\n".join(conffiles) + "\n")
        for name, lines in self.scripts.items():
            control[name] = File(f"#!/bin/sh\nset -e\n{lines}", 0o755)
        everything = {f"/DEBIAN/{name}": file for name, file in control.items()} | {**self.files}
        for path, file in everything.items():
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            content = file.content
            target.write_bytes(content.encode() if isinstance(content, str) else content)
            target.chmod(file.mode)
        for staged in (*root.rglob("*"), root):
            if staged.is_dir():
                staged.chmod(0o755)
            os.utime(staged, (EPOCH, EPOCH))
