"""RUNS ON THE NODE: run a package transaction with dnf 4 and rpm.

`transaction.py` defines the order of the steps.

The vendors' repositories are in a folder of gpufleet, which is used only by gpufleet's command
lines. dnf's shell runs removals and installations as one transaction. The shell always exits with
status 0. So its output is parsed (in the C locale), and the database is read afterwards.
"""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Optional, Tuple

from gpufleet.on_node.packages import steps
from gpufleet.on_node.packages.installed import RPM_ROW, SEVERAL, locked_names, with_version
from gpufleet.on_node.packages.outcome import Change, Installed
from gpufleet.on_node.packages.steps import Output, RefusedError

CACHE = "/var/cache/gpufleet/dnf"
SIZE = r"^%s: ([\d.]+) ?([kMGT]?)$"
UNITS = {"": 1, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Lines that show a failure. If a package's own script fails, dnf's transaction still succeeds.
FAILED = re.compile(
    r"^(> )*(Error|Problem)\b|scriptlet failed|No match for argument|were filtered out"
    r"|Operation aborted",
    re.M,
)
MARGIN_BYTES = 64 << 20


class Dnf:
    """The node's dnf and rpm database, below `root`."""

    kind = "dnf"

    def __init__(self, asked: Dict[str, Any]) -> None:
        self.asked = asked
        self.root = asked["root"]
        self.steps = asked["steps"]
        self.simulated = ""
        self.down: List[Tuple[Optional[str], Optional[str]]] = []

    def run(self, name: str, stdin: str = "") -> Output:
        """Run a step of the plan. If dnf hides a failure, the returned status shows it."""
        output = steps.run(self.root, self.steps[name], stdin=stdin)
        hidden = not output.status and self.steps[name]["argv"][-1] == "shell"
        if hidden and FAILED.search(output.text):
            return Output(1, output.text)
        return output

    # --- installed packages

    def installed(self) -> Dict[str, Installed]:
        """Return rpm's packages, by name and by name:architecture."""
        held = locked_names(self.root)
        found = {}
        for name, architecture, version in self._rows():
            state = Installed(version, True, name in held)
            found[name] = state
            found[name + ":" + architecture] = state
            if SEVERAL.match(name):
                found[with_version(name, version)] = state
        return found

    def _rows(self) -> List[Tuple[str, str, str]]:
        where = ("--root", self.root) if self.root else ()
        text = steps.ask("rpm", *where, "-qa", "--qf", RPM_ROW)
        rows = (line.split("\t") for line in text.splitlines())
        return sorted((row[0], row[1], row[2]) for row in rows if len(row) == 3)

    def unfinished(self) -> List[str]:
        """Return the packages that an interrupted run of rpm left in two versions."""
        seen, twice = set(), set()
        for name, architecture, _ in self._rows():
            if (name, architecture) in seen and not SEVERAL.match(name):
                twice.add(name)
            seen.add((name, architecture))
        return sorted(twice)

    def older(self, one: str, other: str) -> bool:
        """Return whether the simulation reports a change from `other` to `one` as a downgrade."""
        return (other, one) in self.down

    def finish(self) -> Output:
        """Remove the second versions of packages that an interrupted run left."""
        return self.run("finish")

    def repair(self) -> None:
        """Do nothing, because rpm keeps the previous version until the new version is complete."""

    # --- sources

    def prepare(self) -> None:
        """Create the cache folder."""
        os.makedirs(self.root + CACHE, mode=0o755, exist_ok=True)

    def fetch(self) -> List[str]:
        """
        Fetch every index.

        Raises `RefusedError` if a vendor's index cannot be fetched or verified.
        """
        if "fetch vendors" in self.steps:
            output = self.run("fetch vendors")
            if output.status:
                raise RefusedError(
                    "the package source %s cannot be used: %s. dnf said: %s"
                    % (
                        " and ".join(
                            "%s (%s)" % (source["id"], source["url"])
                            for source in self.asked["sources"]
                        ),
                        explain_error(output.text),
                        " | ".join(errors(output.text)[:4]) or output.last,
                    )
                )
        output = self.run("fetch")
        for name, _ in self.asked["streams"]:
            for verb in ("reset", "enable"):
                done = self.run("%s %s" % (verb, name))
                if done.status:
                    raise RefusedError(
                        "the stream of the dnf module %s cannot be set: %s" % (name, done.last)
                    )
        return (errors(output.text) or [output.last]) if output.status else []

    # --- simulation

    def simulate(self) -> List[Change]:
        """
        Return the changes that dnf would make.

        Raises `RefusedError` with the reasons if dnf finds no solution.
        """
        text = self.run("simulate").text
        wrong = [line for line in errors(text) if "Operation aborted" not in line]
        if wrong:
            raise RefusedError("dnf finds no solution: %s" % " | ".join(wrong[:8]))
        self.simulated = text
        installed = self.installed()
        changes = []
        for section, name, version in parse_listing(text):
            before = installed[name].version if name in installed else None
            gone = section.startswith(("Removing", "replacing"))
            after = None if gone else version
            changes.append(Change(name, version if gone else before, after))
            if section == "Downgrading":
                self.down.append((before, after))
        return [change for change in changes if change.before != change.after]

    def needs(self, changes: List[Change]) -> Dict[str, int]:
        """Return {folder: bytes that the changes need in it}, from dnf's summary."""
        if not any(change.after for change in changes):
            return {}
        download = self._size("Total download size")
        return {CACHE: download, "/usr": self._size("Installed size") + MARGIN_BYTES}

    def _size(self, what: str) -> int:
        match = re.search(SIZE % what, self.simulated, re.M)
        return int(float(match.group(1)) * UNITS[match.group(2)]) if match else 0

    # --- changes

    def download(self) -> Output:
        """Download and verify every package."""
        return self.run("download")

    def install(self) -> Output:
        """Install, change and remove the packages."""
        return self.run("install")

    def restore(self, changes: List[Change]) -> Output:
        """Restore the previous versions."""
        lines = ["remove %s" % one.name for one in changes if not one.before]
        lines += ["install %s-%s" % (one.name, one.before) for one in changes if one.before]
        return self.run("restore", "\n".join([*lines, "run", ""]))

    def mark(self) -> None:
        """Release and set version locks, as the plan requires."""
        for name in ("release", "hold"):
            if name in self.steps:
                output = self.run(name)
                if output.status:
                    raise RefusedError(
                        "`dnf versionlock` failed. Is python3-dnf-plugin-versionlock installed? %s"
                        % output.last
                    )

    def renew_holds(self, held: List[str]) -> None:
        """Update the locks of changed packages to their new versions."""
        if held:
            step = next(self.steps[name] for name in ("install", "simulate") if name in self.steps)
            words = [word for word in step["argv"] if not word.startswith("--disableplugin")]
            words = [word for word in words[:-1] if word != "-y"]
            for verb in ("delete", "add"):
                lock = {"argv": [*words, "versionlock", verb], "seconds": 120, "stdin": ""}
                steps.run(self.root, lock, held)

    def clean(self) -> None:
        """Delete the downloaded packages."""
        if "clean" in self.steps:
            self.run("clean")


def parse_listing(text: str) -> List[Tuple[str, str, str]]:
    """
    Return [(section, name, version)] from dnf's table.

    If a name is too long for its column, it has its own line, and the rest is on the next line.
    """
    found, section, begun = [], "", ""
    for line in text.splitlines():
        if re.match(r"^[A-Z][a-z ]+:$", line):
            section, begun = line[:-1], ""
        elif not line.strip() or line.startswith("="):
            section = "" if not line.strip() else section
        elif section and line.lstrip().startswith("replacing "):
            # replacing  nvidia-old.x86_64 580.95.05-1
            words = line.split()
            found.append(("replacing", words[1].rpartition(".")[0], words[2]))
        elif section and line.startswith(" "):
            words = (begun + " " + line).split() if line.startswith("  ") else line.split()
            begun = words[0] if len(words) == 1 else ""
            if len(words) >= 3 and not section.startswith("Enabling"):
                found.append((section, words[0], words[2]))
    return found


def errors(text: str) -> List[str]:
    """Return dnf's error lines."""
    pattern = re.compile(
        r"(Error:|Problem|No match for argument|All matches were filtered|Unable to find|  - )"
    )
    lines = (re.sub(r"^(> )+", "", line).rstrip() for line in text.splitlines())
    return [line.strip() for line in lines if pattern.search(line) and "_dnf_local" not in line]


MEANINGS = (
    (r"GPG|signature|repomd.xml.asc",
     "its index is not signed by its key, so its packages are not used: compare the key, and see "
     "whether the address is the vendor's or a true mirror"),
    (r"checksum|mismatch",
     "its files differ from its index, as during an update of a mirror: run again later"),
    (r"Status code: 404|No such file|Cannot download repomd",
     "there is no repository at this address, or the node cannot reach it: correct the address or "
     "fix the connection"),
    (r"parse|XML", "its index is malformed: use a mirror with the previous index"),
)  # fmt: skip


def explain_error(text: str) -> str:
    """Return the meaning of dnf's error, with the remedy."""
    return next(
        (said for pattern, said in MEANINGS if re.search(pattern, text, re.I)),
        "its index cannot be fetched",
    )
