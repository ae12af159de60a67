"""Compute the directories and credentials of Prometheus and Alertmanager on a node. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpufleet.converge.desired import Directory, File, NoOtherFiles, Value

ACCOUNT = "prometheus"
"""The account that the servers run as. Debian's packages use the same account."""

# Debian's directory, so that the measurements and silences of an existing server are kept.
STATE = "/var/lib/prometheus"


def directories(home: str, data: str) -> tuple[Value, ...]:
    """Return the directories for the configuration and the data of a server."""
    return (
        Directory(home, group=ACCOUNT, mode=0o750),
        Directory(data, user=ACCOUNT, group=ACCOUNT),
    )


def credentials(home: str, secrets: Mapping[str, bytes]) -> Iterator[Value]:
    """
    Yield the secrets of a server, readable only by the server and root. Other secrets are removed.
    """
    yield Directory(f"{home}/credentials", group=ACCOUNT, mode=0o750)
    for path, content in secrets.items():
        yield File(f"{home}/{path}", content, group=ACCOUNT, mode=0o640, secret=True)
    yield NoOtherFiles(f"{home}/credentials/*")
