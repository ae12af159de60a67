"""RUNS ON THE NODE: decide whether a simulated package transaction may be carried out. Pure.

The simulated installations, removals and changes are compared with the request. The transaction is
refused if it would remove or downgrade a package, or release a hold, without a request.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Callable, Dict, List, NamedTuple, Optional


class Change(NamedTuple):
    """A package's version before and after the transaction. None means not installed."""

    name: str
    before: Optional[str]
    after: Optional[str]


class Installed(NamedTuple):
    """
    A package in the database.

    `whole` is true if the package is completely installed and configured. `torn` is true if some of
    its files are from a different version, so that the package must be unpacked again.
    """

    version: str
    whole: bool
    held: bool
    torn: bool = False


def judge(
    changes: List[Change],
    asked: Dict[str, Any],
    installed: Dict[str, Installed],
    older: Callable[[str, str], bool],
) -> List[str]:
    """
    Return the reasons against a transaction as sentences. If there are none, it may be carried out.

    `asked` has `install` [[name, version]], `remove` [name] and `lockstep` [[name]]: groups of
    packages that must have the same version.
    """
    wanted = dict(asked["install"])
    removed = set(asked["remove"])
    # Packages that must follow a wanted package have the same upstream version. Examples are the
    # other libraries of a driver.
    targets = {
        upstream(change.after) for change in changes if change.name in wanted and change.after
    }
    reasons = []
    for change in changes:
        found = installed.get(change.name)
        if change.before and not change.after and change.name not in removed:
            reasons.append(
                "%s %s would be removed, but that was not requested: a wanted package conflicts "
                "with it. Remove it by hand if you do not need it" % (change.name, change.before)
            )
        if change.name in wanted or change.name in removed or not change.after:
            continue
        if found is not None and found.held and change.before:
            reasons.append(
                "%s is held at %s, but would be changed to %s: release it with `apt-mark unhold` "
                "(dnf versionlock delete), or declare that version"
                % (change.name, change.before, change.after)
            )
        elif (
            change.before
            and older(change.after, change.before)
            and upstream(change.after) not in targets
        ):
            reasons.append(
                "%s would be downgraded from %s to %s, but that was not requested"
                % (change.name, change.before, change.after)
            )
    after = outcome(changes, installed)
    return reasons + package_mismatches(asked, after) + out_of_step(asked["lockstep"], after)


def outcome(changes: List[Change], installed: Dict[str, Installed]) -> Dict[str, str]:
    """Return {name: version} of the installed packages after the changes."""
    after = {name: found.version for name, found in installed.items()}
    for change in changes:
        # A package has two keys: its name, and its name with the architecture.
        same = [name for name in after if name.startswith(change.name + ":")]
        for name in (change.name, *same):
            if change.after:
                after[name] = change.after
                # Several versions of a package (kernel-devel) may be installed at the same time, so
                # each version gets its own key.
                after["%s-%s" % (name, change.after.rpartition(":")[2])] = change.after
            else:
                after.pop(name, None)
    return after


def package_mismatches(asked: Dict[str, Any], after: Dict[str, str]) -> List[str]:
    """Return a sentence for each package that would not be as requested."""
    sentences = []
    for name, version in asked["install"]:
        found = after.get(name)
        if found is None:
            sentences.append("%s would not be installed" % name)
        elif version and not accepts(version, found):
            sentences.append("%s would be version %s, but %s is wanted" % (name, found, version))
    return sentences + [
        "%s %s would stay, but must be removed" % (name, after[name])
        for name in asked["remove"]
        if name in after
    ]


def out_of_step(groups: List[List[str]], after: Dict[str, str]) -> List[str]:
    """
    Return a sentence for each group of packages that would have more than one upstream version.
    """
    sentences = []
    for names in groups:
        versions: Dict[str, List[str]] = {}
        for name in names:
            if name in after:
                versions.setdefault(upstream(after[name]), []).append(name)
        if len(versions) > 1:
            said = "; ".join(
                "%s of %s" % (version, ", ".join(sorted(members)))
                for version, members in sorted(versions.items())
            )
            sentences.append(
                "packages that must have the same version would have different versions (%s): the "
                "repository lacks some of them in the wanted version, or they are pinned" % said
            )
    return sentences


def accepts(wanted: str, found: str) -> bool:
    """Return whether an installed version is accepted. The rule is wanted.Package.accepts."""
    if ":" not in wanted:
        found = found.rpartition(":")[2]
    if wanted.endswith("*"):
        return found.startswith(wanted[:-1])
    return wanted == found


def upstream(version: Optional[str]) -> str:
    """Return a version without epoch and packaging revision."""
    return (version or "").rpartition(":")[2].partition("-")[0]


def matches(name: str, patterns: List[str]) -> bool:
    """Return whether a package's name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
