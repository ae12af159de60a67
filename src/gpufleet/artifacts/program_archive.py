"""
Compute the path of a program that comes as its publisher's .tar.gz, and its download script. Pure.

Each archive has its own directory: /opt/gpufleet/<name>/<first 12 digits of the sha256>. The
directory gets this name only when it is complete. So if the directory exists, it is correct, and
nothing is downloaded again. The version that runs is kept until a different version runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote

from gpufleet import node_paths
from gpufleet.settings.monitoring_settings import PublishedProgram

DIRECTORY = node_paths.ARCHIVES
# Enough for about 100 MB (Prometheus) over a slow connection.
DOWNLOAD_SECONDS = 1800
# A download continues after its controller has ended. The next download waits for it.
WAIT_SECONDS = 600
# Programs that the script needs on a node.
PACKAGES = ("ca-certificates", "curl")


@dataclass(frozen=True)
class ProgramArchive:
    """
    A program on a node.

    `name` is the name of the program's directory. `programs` are files that the archive must have
    in its only top folder.
    """

    name: str
    archive: PublishedProgram
    programs: tuple[str, ...]

    @property
    def all_versions(self) -> str:
        """The directory of all versions."""
        return f"{DIRECTORY}/{self.name}"

    @property
    def version(self) -> str:
        """The name of this version's directory."""
        return self.archive.sha256[:12]

    @property
    def directory(self) -> str:
        """The directory of this version. It exists only if the version is complete."""
        return f"{self.all_versions}/{self.version}"

    def program(self, name: str) -> str:
        """Return the path of the program with this name in the archive."""
        return f"{self.directory}/{name}"

    def other_versions(self, names: frozenset[str]) -> tuple[str, ...]:
        """Return which of `names`, the names in `all_versions`, are other versions, sorted."""
        return tuple(
            sorted(name for name in names if name != self.version and not name.startswith("."))
        )


def install_script(wanted: ProgramArchive) -> str:
    """
    Return the shell script that downloads the program. The script is idempotent.

    The archive's hash is verified before the archive is unpacked. An archive must have only one top
    folder, like the archives of all Prometheus programs. The owners and setuid bits of its files
    are not used.
    """
    url, there = wanted.archive.url, wanted.directory
    new = f"{wanted.all_versions}/.{wanted.version}.new"
    has = " && ".join(f"test -x {quote(f'{new}/files/{name}')}" for name in wanted.programs)
    refused = (
        f"the content of {url} does not match its sha256 in group_vars: correct the URL or the "
        "sha256 (the cause may also be an error page of a proxy)"
    )
    lacks = f"{url} contains no folder with {' and '.join(wanted.programs)}"
    return f"""set -eu
umask 022
test -e {there} && exit 0
mkdir -p {wanted.all_versions}
exec 9>{wanted.all_versions}/.lock
flock -w {WAIT_SECONDS} 9 || {{ echo 'another download has run on this node for {WAIT_SECONDS} s: \
wait for it, or end it, and run the deploy again' >&2; exit 1; }}
test -e {there} && exit 0
rm -rf {new}
mkdir -p {new}/files
trap 'rm -rf {new}' EXIT
curl -fsSL --retry 3 --connect-timeout 20 --speed-limit 1000 --speed-time 60 \\
    -o {new}/archive -- {quote(url)}
echo '{wanted.archive.sha256}  {new}/archive' | sha256sum --check --status \\
    || {{ echo {quote(refused)} >&2; exit 1; }}
tar -xzf {new}/archive -C {new}/files --strip-components=1 --no-same-owner --no-same-permissions
{has} || {{ echo {quote(lacks)} >&2; exit 1; }}
chown -R root:root {new}/files
sync -f {new}/files
mv -T {new}/files {there}
sync -f {wanted.all_versions}
"""
