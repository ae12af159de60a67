"""Compute the directories and credentials of Prometheus and Alertmanager on a node. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpufleet.converge.desired import Directory, File, NoOtherFiles, Value

ACCOUNT = "prometheus"
"""The account of the processes, the same as in Debian's packages."""

# Debian's directories: what an existing server has measured or silenced stays.
STATE = "/var/lib/prometheus"


def directories(home: str, data: str) -> tuple[Value, ...]:
    """Return the directories of a server's configuration and data."""
    return (
        Directory(home, group=ACCOUNT, mode=0o750),
        Directory(data, user=ACCOUNT, group=ACCOUNT),
    )


def credentials(home: str, secrets: Mapping[str, bytes]) -> Iterator[Value]:
    """Yield a server's secrets, readable only by the server and root; other secrets are removed."""
    yield Directory(f"{home}/credentials", group=ACCOUNT, mode=0o750)
    for path, content in secrets.items():
        yield File(f"{home}/{path}", content, group=ACCOUNT, mode=0o640, secret=True)
    yield NoOtherFiles(f"{home}/credentials/*")
