"""Build the command lines and configuration files of one package transaction, for apt and dnf.

Pure: the module converts a `Plan` to `Step`s. `on_node/packages/transaction.py` runs the steps on
the node in this order, and judges the result of the simulation. `commands(plan)` returns the
command lines for reviewers.

A vendor's repository is never added to the node's own configuration. The index, the cache and the
pins of the repository are in gpufleet's folders, which only these commands use. So the node's own
apt or dnf works whatever the vendor releases, and installs no package from the vendor.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from gpufleet import node_paths
from gpufleet.converge.desired import Lockstep, ModuleStream, Package, PackageSource

Manager = Literal["apt", "dnf"]

# Time limits of one step, in seconds. An index is usually fetched in seconds, but a slow mirror may
# need minutes.
FETCH_SECONDS = 600
# The CUDA toolkit is a download of about 3 GB, which takes an hour at 1 MB/s, and 7 GB are
# unpacked. DKMS needs 1 to 5 minutes to build a module for each kernel.
INSTALL_SECONDS = 3600
# Simulations and marks take some seconds on a busy node.
SHORT_SECONDS = 120
# How long a run waits for another package manager, such as unattended-upgrades.
LOCK_SECONDS = 300
# The whole transaction: the wait, the repair of an interrupted run, both indexes, the download, the
# installation, and the restoration after a failure.
TRANSACTION_SECONDS = LOCK_SECONDS + 2 * FETCH_SECONDS + 4 * INSTALL_SECONDS

APT = node_paths.APT
DNF = node_paths.DNF
STATE = node_paths.PACKAGES
CACHE = node_paths.CACHE


@dataclass(frozen=True)
class Plan:
    """
    The steps of one transaction.

    Attributes:
        install: packages that are missing or have a wrong version. Versions may end in `*`.
        remove: the names of installed packages to remove in the same transaction.
        hold: the names of packages that are held afterwards, including packages whose hold is
            restored.
        release: the names of packages whose hold is removed afterwards.
        sources: the vendors' repositories that this transaction uses.
        lockstep: groups of packages that must have one upstream version afterwards.
        streams: the streams of dnf modules that are enabled first.
        root: "" on a node. In tests, a folder with its own package database.
    """

    manager: Manager
    install: tuple[Package, ...] = ()
    remove: tuple[str, ...] = ()
    hold: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    sources: tuple[PackageSource, ...] = ()
    lockstep: tuple[Lockstep, ...] = ()
    streams: tuple[ModuleStream, ...] = ()
    root: str = ""


@dataclass(frozen=True)
class Step:
    """
    One command line, with its time limit in seconds and its standard input.

    `more` describes the words that the node appends to the command line, for example package names
    from a simulation.
    """

    name: str
    argv: tuple[str, ...]
    seconds: int = SHORT_SECONDS
    stdin: str = ""
    more: str = ""


def steps(plan: Plan) -> tuple[Step, ...]:
    """Return the steps of a transaction in order."""
    return tuple(_apt(plan) if plan.manager == "apt" else _dnf(plan))


def commands(plan: Plan) -> list[tuple[str, ...]]:
    """Return the command lines of a successful transaction in order."""
    asides = {"finish", "repair", "restore"}
    return [
        (*step.argv, *((f"<{step.more}>",) if step.more else ()), *step.stdin.splitlines())
        for step in steps(plan)
        if step.name not in asides
    ]


def files(plan: Plan) -> dict[str, str]:
    """
    Return the configuration files that the steps need, as {path: text}. The run writes them first.
    """
    return _apt_files(plan) if plan.manager == "apt" else _dnf_files(plan)


def parameters(plan: Plan) -> dict[str, Any]:
    """Return the parameters of on_node/packages/transaction.py."""
    return {
        "manager": plan.manager,
        "root": plan.root,
        "install": [[package.name, package.version] for package in plan.install],
        "remove": list(plan.remove),
        "hold": list(plan.hold),
        "release": list(plan.release),
        "lockstep": [list(lockstep.names) for lockstep in plan.lockstep],
        "sources": [asdict(source) for source in plan.sources],
        "streams": [[stream.name, stream.stream] for stream in plan.streams],
        "files": files(plan),
        "steps": {step.name: asdict(step) for step in steps(plan)},
        "lock_seconds": LOCK_SECONDS,
    }


# --- apt


def _apt(plan: Plan) -> list[Step]:
    config = f"{plan.root}{APT}/apt.conf"
    apt = ("apt-get", "-q", "-c", config)
    # The sources in the node's own folders belong to the node. No vendor's source is there.
    own = ("-o", "Dir::Etc::SourceList=/dev/null")
    vendors = ("-o", "Dir::Etc::SourceParts=/dev/null")
    root = ("--root", plan.root, "--force-script-chrootless") if plan.root else ()
    keep = ("--force-confdef", "--force-confold")
    found = [Step("finish", ("dpkg", *root, *keep, "--configure", "-a"), INSTALL_SECONDS)]
    change = (
        "--fix-broken",
        "--purge",
        "--allow-downgrades",
        "--allow-change-held-packages",
        "install",
        "--",
        *(_apt_word(package) for package in plan.install),
        *(f"{name}-" for name in plan.remove),
    )
    if plan.install and plan.sources:
        form = "$(REPO_URI)\t$(ORIGIN)\t$(LABEL)"
        found += [
            Step("fetch vendors", (*apt, *vendors, "update"), FETCH_SECONDS),
            Step(
                "vendors",
                (*apt, *vendors, "indextargets", "--format", form, "Created-By: Packages"),
            ),
        ]
    if plan.install:
        again = (*apt, "-y", "--reinstall", *change[: change.index("--") + 1])
        found += [
            Step("fetch", (*apt, *own, "update"), FETCH_SECONDS),
            Step(
                "repair",
                again,
                INSTALL_SECONDS,
                more="packages of an interrupted transaction, in their versions",
            ),
        ]
    if plan.install or plan.remove:
        found += [
            Step("simulate", (*apt, "--simulate", *change)),
            Step("sizes", ("apt-cache", "-c", config, "show"), more="what would be installed"),
            Step("download", (*apt, "-y", "--download-only", *change), INSTALL_SECONDS),
            Step("install", (*apt, "-y", *change), INSTALL_SECONDS),
            Step(
                "restore",
                (*apt, "-y", *change[: change.index("--") + 1]),
                INSTALL_SECONDS,
                more="the former versions",
            ),
            Step("clean", (*apt, "clean")),
        ]
    mark = ("apt-mark", "-c", config)
    if plan.release:
        found.append(Step("release", (*mark, "unhold", "--", *plan.release)))
    if plan.hold:
        found.append(Step("hold", (*mark, "hold", "--", *plan.hold)))
    return found


def _apt_word(package: Package) -> str:
    return f"{package.name}={package.version}" if package.version else package.name


def _apt_files(plan: Plan) -> dict[str, str]:
    """
    Return apt's configuration file and the file with the vendors' sources.

    The node's own sources and pins are linked into two folders of gpufleet, because apt reads only
    one folder of each kind.
    """
    root, state, cache = plan.root, f"{plan.root}{STATE}", f"{plan.root}{CACHE}"
    settings = {
        "Dir::Etc::SourceList": f"{root}{APT}/vendors.sources",
        "Dir::Etc::SourceParts": f"{state}/sources.list.d",
        "Dir::Etc::Preferences": f"{root}{APT}/preferences",
        "Dir::Etc::PreferencesParts": f"{state}/preferences.d",
        "Dir::State::Lists": f"{state}/lists",
        "Dir::Cache": f"{cache}/apt",
        "DPkg::Lock::Timeout": str(LOCK_SECONDS),
        "APT::Install-Recommends": "false",
        # Each of the two fetches keeps the indexes that the other has fetched.
        "APT::Get::List-Cleanup": "false",
        # If an index cannot be fetched, apt reports an error instead of using an older index.
        "APT::Update::Error-Mode": "any",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
    }
    if root:
        settings |= {"Dir": f"{root}/", "Dir::State::Status": f"{root}/var/lib/dpkg/status"}
    # dpkg keeps a changed configuration file, because there is no terminal on which it could ask
    # (dpkg(1), --force-confold).
    options = ["--force-confdef", "--force-confold"]
    if root:
        options += [f"--root={root}", "--force-script-chrootless"]
    text = "// Written by gpufleet, for its own package runs: apt-get -c THIS-FILE ...\n"
    text += "".join(f'{key} "{value}";\n' for key, value in settings.items())
    text += "".join(f'DPkg::Options:: "{option}";\n' for option in options)
    sources = "\n".join(
        f"# {source.id}\nTypes: deb\nURIs: {source.url}/\nSuites: /\n"
        f"Signed-By: {root}{source.key}\n"
        for source in plan.sources
    )
    return {f"{root}{APT}/apt.conf": text, f"{root}{APT}/vendors.sources": sources}


# --- dnf


def _dnf(plan: Plan) -> list[Step]:
    dnf = _dnf_words(plan)
    free = (*dnf, "--disableplugin=versionlock")  # it would forbid the moves that are wanted
    found = [Step("finish", (*free, "-y", "remove", "--duplicates"), INSTALL_SECONDS)]
    if plan.install and plan.sources:
        # -y: dnf accepts the key without asking. The role has placed the key file.
        vendors = ",".join(source.id for source in plan.sources)
        only = (f"--repo={vendors}", "--refresh", "makecache")
        found.append(Step("fetch vendors", (*free, "-y", *only), FETCH_SECONDS))
    if plan.install:
        own = tuple(f"--disablerepo={source.id}" for source in plan.sources)
        found.append(Step("fetch", (*free, "-y", *own, "makecache"), FETCH_SECONDS))
    for stream in plan.streams:
        full = f"{stream.name}:{stream.stream}"
        found += [
            Step(f"reset {stream.name}", (*free, "-y", "module", "reset", stream.name)),
            Step(f"enable {stream.name}", (*free, "-y", "module", "enable", full)),
        ]
    if plan.install or plan.remove:
        lines = [f"remove {name}" for name in plan.remove]
        lines += [f"install {_dnf_word(package)}" for package in plan.install]
        script = "".join(f"{line}\n" for line in (*lines, "run"))
        found += [
            Step("simulate", (*free, "--assumeno", "shell"), FETCH_SECONDS, script),
            Step("download", (*free, "-y", "--downloadonly", "shell"), INSTALL_SECONDS, script),
            Step("install", (*free, "-y", "shell"), INSTALL_SECONDS, script),
            Step("restore", (*free, "-y", "shell"), INSTALL_SECONDS),
            Step("clean", (*free, "clean", "packages")),
        ]
    # A versionlock names a version, so the lock on the previous version is removed first.
    if unlock := (*plan.release, *plan.hold):
        found.append(Step("release", (*dnf, "versionlock", "delete", *unlock)))
    if plan.hold:
        found.append(Step("hold", (*dnf, "versionlock", "add", *plan.hold)))
    return found


def _dnf_words(plan: Plan) -> tuple[str, ...]:
    """
    Return the dnf command with options for the vendors' repositories.

    The node's own configuration of dnf does not have these repositories.
    """
    root = plan.root
    words = (
        "dnf",
        f"--setopt=reposdir={root}{DNF}/repos.d,{root}/etc/yum.repos.d",
        f"--setopt=cachedir={root}{CACHE}/dnf",
        "--setopt=install_weak_deps=False",
        # Packages that were installed as dependencies and are no longer needed stay. Only the
        # operator removes them.
        "--setopt=clean_requirements_on_remove=False",
    )
    if not root:
        return words
    plugins = f"--setopt=pluginconfpath={root}/etc/dnf/plugins"
    return (*words, f"--installroot={root}", "--releasever=9", plugins)


def _dnf_word(package: Package) -> str:
    return f"{package.name}-{package.version}" if package.version else package.name


def _dnf_files(plan: Plan) -> dict[str, str]:
    """
    Return the file with the vendors' repositories. The index and the packages must both be signed.
    """
    root = plan.root
    return {
        f"{root}{DNF}/repos.d/gpufleet.repo": "\n".join(
            f"[{source.id}]\nname={source.id}\nbaseurl={source.url}\nenabled=1\n"
            f"skip_if_unavailable=0\ngpgcheck=1\nrepo_gpgcheck=1\ngpgkey=file://{root}{source.key}\n"
            f"includepkgs={' '.join(source.packages)}\n"
            for source in plan.sources
        )
    }
