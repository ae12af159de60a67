"""Reboot a node and wait until it answers with a new boot id.

Border: the module closes and opens the node's connection. After the request to reboot, a
node still answers for a while. So only a new boot id proves that the node has rebooted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import gevent
from paramiko import SSHException
from pyinfra import logger
from pyinfra.api import Host, StringCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.connectors.ssh import SSHConnector

from gpufleet.formatting import format_duration
from gpufleet.operations.progress_watch import show_elapsed
from gpufleet.progress import Pace

APART_SECONDS = 3
DISCONNECT_SECONDS = 10
# The time limit for the units that start at boot. The fabric manager trains every NVLink, and
# persistence mode wakes every GPU.
START_SECONDS = 300

_LOST = (PyinfraError, SSHException, OSError, EOFError, gevent.Timeout)


@dataclass(frozen=True)
class Rebooting:
    """The id of the boot before the reboot, and the time limit in seconds for the whole reboot."""

    boot_id: str
    seconds: int


def reboot_node(
    host: Host, wanted: Rebooting, begin: Callable[[], str], boot_id: Callable[[], str | None]
) -> str:
    """
    Reboot a node and wait for it. Return the problem, or "" if the node is back.

    `begin` starts the reboot. It returns why this failed, or "". `boot_id` connects to the node and
    returns the present boot id, or None if the node does not answer.
    """
    if not isinstance(host.connector, SSHConnector):
        return (
            "the node needs a reboot, but the deploy runs on this node: reboot the node, then run "
            "the deploy again"
        )
    began = time.monotonic()
    if problem := begin():
        return problem
    pace = Pace(began)
    while (spent := time.monotonic() - began) < wanted.seconds:
        if pace.is_due(began + spent):
            logger.info(
                "%sthe node reboots, and has not answered for %s (limit: %s)",
                host.print_prefix,
                format_duration(spent),
                format_duration(wanted.seconds),
            )
        # The open connection may be dead although no error was reported.
        _disconnect(host)
        gevent.sleep(APART_SECONDS)
        if boot_id() not in {None, wanted.boot_id}:
            with show_elapsed("the node answers again, and its units start", START_SECONDS):
                _until_started(host)
            spent = time.monotonic() - began
            logger.info(
                "%sthe node has rebooted, and answers again after %.0f s", host.print_prefix, spent
            )
            return ""
    return (
        f"the node did not answer within {wanted.seconds} s after its reboot "
        "(gpu.reboot_seconds): check its console. When the node answers again, run the deploy again"
    )


def _disconnect(host: Host) -> None:
    with suppress(*_LOST), gevent.Timeout(DISCONNECT_SECONDS):
        host.disconnect()
    host.connected = False


def _until_started(host: Host) -> None:
    """
    Wait until the units that start at boot have started.

    The check of the node reports failed units.
    """
    with suppress(*_LOST):
        host.run_shell_command(
            StringCommand(f"timeout {START_SECONDS} systemctl is-system-running --wait || :"),
            _timeout=START_SECONDS + 30,
        )
