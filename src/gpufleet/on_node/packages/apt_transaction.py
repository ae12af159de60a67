"""RUNS ON THE NODE: run a package transaction with apt and dpkg.

`transaction.py` defines the order of the steps.

The vendors' indexes, caches and pins are in folders of gpufleet. Only gpufleet's apt.conf refers to
these folders, so the node's own apt does not use them. apt's output is parsed in the C locale.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import Any, Dict, List, Optional, Tuple

from gpufleet.on_node.packages import steps
from gpufleet.on_node.packages.installed import DPKG_ROW, own_architectures
from gpufleet.on_node.packages.outcome import Change, Installed
from gpufleet.on_node.packages.steps import Output, RefusedError

HOME = "/etc/gpufleet/apt"
STATE = "/var/lib/gpufleet/packages"
CACHE = "/var/cache/gpufleet/apt"
# With a priority above 1000, apt also downgrades to the version (apt_preferences(5)).
EXACT_PRIORITY = 1001
# Pin priorities: the priority of an ordinary repository, and the priority for "never install".
SOURCE_PRIORITY, NEVER = 500, -1
# Additional free space in bytes. dpkg unpacks a package while the previous version still exists,
# and an initramfs is rebuilt.
MARGIN_BYTES = 64 << 20
# "Inst libc6 [2.36-9] (2.36-10 Debian:12/stable [amd64])". A foreign architecture follows the name.
SIMULATED = re.compile(r"^(Inst|Remv|Purg) (\S+)(?: \[(\S+)\])?(?: \((\S+) .*)?", re.M)


class Apt:
    """The node's dpkg and apt, below `root`."""

    kind = "apt"

    def __init__(self, asked: Dict[str, Any]) -> None:
        self.asked = asked
        self.root = asked["root"]
        self.steps = asked["steps"]

    def run(self, name: str, *more: str) -> Output:
        """Run a step of the plan."""
        return steps.run(self.root, self.steps[name], more)

    # --- installed packages

    def installed(self) -> Dict[str, Installed]:
        """Return the packages that have files on disk, by name and by name:architecture."""
        found: Dict[str, Installed] = {}
        fields = [row.split("\t") for row in self._query("-f", DPKG_ROW).splitlines()]
        own = own_architectures(fields)
        # The native architecture is last, so that of two packages with one name, the native package
        # gets the name without an architecture.
        for status, name, architecture, version in sorted(fields, key=lambda row: row[2] in own):
            if status[1] in "nc":  # n: not installed; c: only its configuration is left
                continue
            torn = status[2:3] == "R"
            state = Installed(version, status[1] == "i" and not torn, status[0] == "h", torn)
            found[name] = found[name + ":" + architecture] = state
        return found

    def _query(self, *arguments: str) -> str:
        where = ("--admindir", self.root + "/var/lib/dpkg") if self.root else ()
        return steps.ask("dpkg-query", *where, "-W", *arguments, status=(0, 1))

    def unfinished(self) -> List[str]:
        """Return the packages that an interrupted run of dpkg left incomplete."""
        with contextlib.suppress(FileNotFoundError):
            if any(name.isdigit() for name in os.listdir(self.root + "/var/lib/dpkg/updates")):
                return ["an interrupted dpkg"]
        return sorted(
            name for name, state in self.installed().items() if not state.whole and ":" not in name
        )

    def older(self, one: str, other: str) -> bool:
        """Return whether `one` is an older version than `other`, in dpkg's order."""
        words = ("dpkg", "--compare-versions", one, "lt", other)
        try:
            steps.ask(*words)
        except RefusedError:
            return False
        return True

    # --- repair

    def finish(self) -> Output:
        """Make dpkg finish the work of an interrupted run."""
        return self.run("finish")

    def repair(self) -> None:
        """Unpack packages again that were unpacked only in part. This needs the index."""
        torn = [
            "%s=%s" % (name, state.version)
            for name, state in self.installed().items()
            if state.torn and ":" not in name
        ]
        if torn:
            self.run("repair", *torn)

    # --- sources

    def prepare(self) -> None:
        """
        Create gpufleet's folders for apt. They have links to the node's own sources and pins.

        The node's sources and pins for the vendors' repositories are left out.
        """
        for folder in ("/lists/partial", "/sources.list.d", "/preferences.d"):
            os.makedirs(self.root + STATE + folder, mode=0o755, exist_ok=True)
        os.makedirs(self.root + CACHE + "/archives/partial", mode=0o755, exist_ok=True)
        if self.root:
            os.makedirs(self.root + "/var/log/apt", exist_ok=True)
        self._link("sources.list", "sources.list.d", (".list", ".sources"))
        self._link("preferences", "preferences.d", ("", ".pref"))
        lists = self.root + STATE + "/lists"
        if os.listdir(lists) == ["partial"]:
            # Copy the indexes that the node's own apt has fetched, so that they are not fetched
            # again.
            _copy_files(self.root + "/var/lib/apt/lists", lists)
        self._prefer([])

    def _link(self, single: str, folder: str, endings: Tuple[str, ...]) -> None:
        ours = os.path.join(self.root + STATE, folder)
        for name in os.listdir(ours):
            os.unlink(os.path.join(ours, name))
        theirs = os.path.join(self.root + "/etc/apt", folder)
        paths = {name: os.path.join(theirs, name) for name in _names(theirs)}
        # apt reads this file before the others, so its name must sort first.
        paths["00-" + single + (".list" if single == "sources.list" else "")] = os.path.join(
            self.root + "/etc/apt", single
        )
        for name, path in sorted(paths.items()):
            known = os.path.isfile(path) and os.path.splitext(name)[1] in endings
            if known and not self._is_vendors(path):
                os.symlink(path, os.path.join(ours, name))

    def _is_vendors(self, path: str) -> bool:
        """
        Return whether a file has one of gpufleet's sources.

        apt refuses a source that is configured twice with different keys.
        """
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        return any(source["url"] in text for source in self.asked["sources"])

    def fetch(self) -> List[str]:
        """
        Fetch every index, and return the errors of the node's own sources.

        Raises `RefusedError` if the index of a vendor's source cannot be fetched.
        """
        if "fetch vendors" in self.steps:
            output = self.run("fetch vendors")
            if output.status:
                raise RefusedError(self._unusable(output))
            self._prefer(self._fences(self.run("vendors")))
        output = self.run("fetch")
        return errors(output.text) if output.status else []

    def _unusable(self, output: Output) -> str:
        text = "\n".join(errors(output.text)) or output.last
        guilty = [
            source
            for source in self.asked["sources"]
            if source["url"] in text or _as_file(source["url"]) in text
        ]
        named = " and ".join(
            "%s (%s)" % (source["id"], source["url"]) for source in guilty or self.asked["sources"]
        )
        return "the package source %s cannot be used: %s. apt said: %s" % (
            named,
            _meaning(output.text),
            " | ".join(text.splitlines()[:4]),
        )

    def _fences(self, output: Output) -> List[Tuple[Dict[str, Any], str]]:
        """
        Return [(source, pin expression for the source's packages)], from the Release files.
        """
        labels = {}
        for row in output.text.splitlines():
            if row.count("\t") == 2:
                uri, origin, label = row.split("\t")
                labels[uri.rstrip("/")] = (origin, label)
        found = []
        for source in self.asked["sources"]:
            origin, label = labels.get(source["url"], ("", ""))
            words = [
                "%s=%s" % (key, value)
                for key, value in (("o", origin), ("l", label))
                if value and "," not in value  # a comma separates fields (apt_preferences(5))
            ]
            if not words:
                raise RefusedError(
                    "the package source %s (%s) has a Release file without Origin and Label, so "
                    "apt cannot distinguish its packages from other packages: mirror the vendor's "
                    "index unchanged" % (source["id"], source["url"])
                )
            found.append((source, "release " + ",".join(words)))
        return found

    def _prefer(self, fences: List[Tuple[Dict[str, Any], str]]) -> None:
        """Write gpufleet's pins. apt uses the first record that matches a package."""
        records = []
        for names, version in pinned(self.asked):
            records.append((" ".join(names), "version " + version, EXACT_PRIORITY))
        for source, expression in fences:
            records.append((" ".join(source["packages"]), expression, SOURCE_PRIORITY))
        records += [("*", expression, NEVER) for _, expression in fences]
        text = "".join("Package: %s\nPin: %s\nPin-Priority: %d\n\n" % record for record in records)
        with open(self.root + HOME + "/preferences", "w") as file:
            file.write(
                "Explanation: written by gpufleet for one of its package runs\n" * bool(text)
            )
            file.write(text)

    # --- simulation

    def simulate(self) -> List[Change]:
        """
        Return the changes that apt would make.

        Raises `RefusedError` with the reasons if apt finds no solution.
        """
        output = self.run("simulate")
        if output.status:
            why = [*reasons(output.text), *self._holds(output.text)]
            raise RefusedError("apt finds no solution: %s" % " | ".join(why))
        installed = self.installed()
        changes = {}
        for verb, name, before, after in SIMULATED.findall(output.text):
            known = installed[name].version if name in installed else None
            changes[name] = Change(
                name, before or known, (after or None) if verb == "Inst" else None
            )
        return [change for change in changes.values() if change.before != change.after]

    def _holds(self, text: str) -> List[str]:
        """
        Return the held packages that apt's output mentions and whose hold the request keeps.
        """
        ours = {name for name, _ in self.asked["install"]} | set(self.asked["remove"])
        return [
            "%s is held at %s" % (name, state.version)
            for name, state in sorted(self.installed().items())
            if state.held and name not in ours and re.search(r"\b%s\b" % re.escape(name), text)
        ]

    def needs(self, changes: List[Change]) -> Dict[str, int]:
        """
        Return {folder: bytes that the changes need in it}, from the packages' metadata.
        """
        words = ["%s=%s" % (c.name, c.after) for c in changes if c.after]
        if not words:
            return {}
        sizes, download, unpacked = self.run("sizes", *words), 0, 0
        for block in sizes.text.split("\n\n"):
            fields = dict(re.findall(r"^(Size|Installed-Size): (\d+)$", block, re.M))
            download += int(fields.get("Size", 0))
            unpacked += int(fields.get("Installed-Size", 0)) << 10
        gone = sum(self._size_of(change.name) for change in changes if change.before)
        return {CACHE + "/archives": download, "/usr": max(0, unpacked - gone) + MARGIN_BYTES}

    def _size_of(self, name: str) -> int:
        text = self._query("-f", "${Installed-Size}\n", name).split()
        return int(text[0]) << 10 if text and text[0].isdigit() else 0

    # --- changes

    def download(self) -> Output:
        """Download and verify every package, so that errors are found before any change."""
        return self.run("download")

    def install(self) -> Output:
        """Install, change and remove the packages."""
        return self.run("install")

    def restore(self, changes: List[Change]) -> Output:
        """Restore the previous versions."""
        with open(self.root + HOME + "/preferences", "w"):
            pass  # gpufleet's pins are only for the wanted versions
        words = ["%s=%s" % (c.name, c.before) if c.before else c.name + "-" for c in changes]
        return self.run("restore", *words)

    def mark(self) -> None:
        """Release and set holds, as the plan requires."""
        for name in ("release", "hold"):
            if name in self.steps:
                output = self.run(name)
                if output.status:
                    raise RefusedError("%s failed: %s" % (self.steps[name]["argv"][0], output.last))

    def renew_holds(self, held: List[str]) -> None:
        """Set the holds again that apt removed."""
        if held:
            again = {"argv": ["apt-mark", "-c", self.root + HOME + "/apt.conf", "hold", "--"]}
            steps.run(self.root, {**again, "seconds": 60, "stdin": ""}, held)

    def clean(self) -> None:
        """Delete the downloaded packages."""
        if "clean" in self.steps:
            self.run("clean")


def pinned(asked: Dict[str, Any]) -> List[Tuple[List[str], str]]:
    """
    Return [(names, version pattern)] for the versions that apt must prefer to all others.

    The list has each wanted version. If packages must have the same version (lockstep), the list
    also has this version for all packages that match the sources' patterns, because dependent
    packages must get the same version.
    """
    wanted = {name: version for name, version in asked["install"] if version}
    found = [([name], version) for name, version in sorted(wanted.items())]
    globs = [pattern for source in asked["sources"] for pattern in source["packages"]]
    for names in asked["lockstep"]:
        version: Optional[str] = next((wanted[name] for name in names if name in wanted), None)
        if version:
            exact, dash, _ = version.partition("-")
            found.append(([*names, *globs], exact + "-*" if dash else version))
    return found


def errors(text: str) -> List[str]:
    """Return apt's error lines, and its warnings about signatures."""
    lines = [line.strip() for line in text.splitlines()]
    found = [line[2:].strip() for line in lines if line.startswith("E:")]
    return found + [line[2:].strip() for line in lines if line.startswith("W: GPG error")]


def reasons(text: str) -> List[str]:
    """
    Return the reasons why apt finds no solution.

    Lines about dependencies come first. They have no prefix in apt's output.
    """
    depends = [
        " ".join(line.split())
        for line in text.splitlines()
        if re.match(r"^ \S+ : |^ {3,}(Depends|PreDepends|Conflicts|Breaks|Recommends):", line)
    ]
    return [*depends, *errors(text)] or [text.strip()[-500:]]


# (pattern of apt's error, its meaning and what to do)
MEANINGS = (
    (r"NO_PUBKEY|is not signed|BADSIG|signatures? (were|was|is) invalid|NODATA",
     "its index is not signed by its key, so its packages are not used: compare the key, and "
     "check that the address is the vendor's or an exact mirror"),
    (r"no Package: header|could not be parsed|MergeList|Unable to parse|corrupted",
     "its index is malformed, which only the vendor can fix; until then use a mirror with the "
     "previous index"),
    (r"Hash Sum mismatch|unexpected size|weak security",
     "its files differ from its signed index, as during an update of a mirror: run again later"),
    (r"does not have a Release file|404",
     "there is no repository at this address: correct it"),
    (r"Could not (resolve|connect|handshake)|Unable to connect|timed out|Connection|unreachable",
     "the node cannot reach it: fix the connection, or name a mirror that it can reach"),
    (r"Conflicting values", "the node's own apt has the same address with another key"),
)  # fmt: skip


def _meaning(text: str) -> str:
    return next(
        (meaning for pattern, meaning in MEANINGS if re.search(pattern, text, re.I)),
        "its index cannot be fetched",
    )


def _as_file(url: str) -> str:
    """Return the file name that apt uses for the index of an address."""
    return url.partition("://")[2].lstrip("/").replace("/", "_") or url


def _names(folder: str) -> List[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _copy_files(source: str, target: str) -> None:
    for name in _names(source):
        path = os.path.join(source, name)
        if os.path.isfile(path) and name != "lock":
            shutil.copy2(path, os.path.join(target, name))
