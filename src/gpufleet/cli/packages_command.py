"""`gpufleet packages ...`: lock nodes' packages, and look up their vulnerabilities.

Thin: runs uv, or queries a source of advisories, and writes or prints the result.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from gpufleet.artifacts import package_lock
from gpufleet.cli.common_options import json_option, print_json
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError, file_fault
from gpufleet.formatting import count_of, suggestion
from gpufleet.paths import write_whole
from gpufleet.sanitize import printable

CHANGED = FOUND = 1
"""The exit status of `lock --dry` if a file would change, and of `audit` if it finds advisories."""


@click.group()
def packages() -> None:
    """Lock the packages of nodes, and look up advisories."""


@packages.command("lock", cls=StrictCommand)
@click.argument("program")
@click.argument("version")
@click.option(
    "--also",
    multiple=True,
    metavar="NAME==VERSION",
    help="Additional package to lock. Can be repeated.",
)
@click.option(
    "--python", metavar="X.Y", help="Python version of the nodes. For litellm, the oldest version."
)
@click.option(
    "--index",
    metavar="URL",
    help="Package index.  [default: UV_DEFAULT_INDEX, or the default of uv]",
)
@click.option(
    "--find-links",
    multiple=True,
    metavar="WHERE",
    help="Page with links to wheels, or directory with wheels.",
)
@click.option(
    "--folder", default="locks", metavar="DIR", help="Directory of the locks.", show_default=True
)
@click.option("--upgrade", is_flag=True, help="Upgrade the packages of an existing lock.")
@click.option("--dry", is_flag=True, help="Print the lock, and do not write it.")
def lock(
    program: str,
    version: str,
    *,
    also: tuple[str, ...],
    python: str | None,
    index: str | None,
    find_links: tuple[str, ...],
    folder: str,
    upgrade: bool,
    dry: bool,
) -> int:
    """
    Write the lock file of PROGRAM (vllm, sglang, litellm or uv) in VERSION, and an SBOM.

    The program uv resolves the versions of all packages. The command queries no node. Versions in
    an existing lock are kept. The lock contains only hashes of wheels, because nodes build no
    packages. The SBOM (CycloneDX 1.5) lists every package and file. It is written beside the lock.

    \b
    gpufleet packages lock vllm 0.32.0
    gpufleet packages lock vllm 0.32.0 --also ray==2.60.0
    gpufleet packages lock sglang 0.5.23
    gpufleet packages lock litellm 1.106.2 --python 3.10

    Exit status: 0: written or unchanged. 1: with --dry, the lock would be written. 2: refused.
    """
    from gpufleet.bundle.package_resolution import resolve

    known = package_lock.PROGRAMS.get(program)
    if known is None:
        names = ", ".join(package_lock.PROGRAMS)
        hint = suggestion(program, [*package_lock.PROGRAMS])
        raise FleetError(f"{program}: gpufleet can lock only {names}{hint}")
    wanted = (package_lock.requirement(program, version), *also)
    path = Path(folder) / known.file.format(version=version)
    beside = path.with_name(path.stem + package_lock.SBOM_SUFFIX)
    there = _content(path)
    kept = "" if upgrade or there is None else package_lock.constraints(there, program)
    answer = resolve(
        wanted, known, python=python, index=index, find_links=find_links, constraints=kept
    )
    found = package_lock.packages(answer)
    text = package_lock.lock_text(found)
    sbom = package_lock.sbom_text(found, program, version)
    if problems := package_lock.sbom_differences(text, sbom):
        raise FleetError(*(f"{path}: {each}" for each in problems))
    if there == text and _content(beside) == sbom:
        click.echo(f"{path} already has these packages", err=True)
        return 0
    if dry:
        click.echo(text, nl=False)
        click.echo(f"would be written to {path}, and its SBOM to {beside}", err=True)
        return CHANGED
    # The lock is written last, so that every lock that exists has an SBOM.
    write_whole(beside, sbom)
    write_whole(path, text)
    wheels = sum(len(each.wheels) for each in found)
    click.echo(f"{path} is written: {count_of(len(found), 'package')}, {wheels} wheels", err=True)
    return 0


@packages.command("audit", cls=StrictCommand)
@click.argument("lock_file", metavar="LOCK")
@click.option(
    "--advisories", required=True, metavar="URL", help="Source of advisories with OSV's API."
)
@json_option
def audit(lock_file: str, *, advisories: str, as_json: bool) -> int:
    """
    List known vulnerabilities of the packages in LOCK.

    URL is a source of advisories with OSV's API, as for `uv audit --service-url`. The command sends
    the names and versions of the packages to this source.

    \b
    gpufleet packages audit locks/vllm-0.32.0.txt --advisories https://advisories.example.net

    Exit status: 0: no vulnerability is known. 1: at least one is known. 2: the source did not
    answer for every package.
    """
    from gpufleet.bundle import advisories as source

    text = _content(Path(lock_file))
    if text is None:
        raise FleetError(f"{lock_file}: there is no such file")
    pins = [*package_lock.pins_of(text)]
    found = source.find(advisories, pins)
    if as_json:
        print_json([asdict(each) for each in found])
        return FOUND if found else 0
    for each in found:
        called = f"{each.id} ({', '.join(each.aliases)})" if each.aliases else each.id
        fixed = f"fixed in {', '.join(each.fixed_in)}" if each.fixed_in else "no fix is known"
        click.echo(printable(f"{each.package} {each.version}: {called}, {fixed}"))
    asked = count_of(len(set(pins)), "package")
    click.echo(f"{lock_file}: {asked} looked up, {len(found)} advisories", err=True)
    return FOUND if found else 0


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FleetError(f"{path} cannot be read: {file_fault(error)}") from None
