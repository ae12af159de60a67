"""Guard the ports of a node: the table of nftables, and the unit that loads it at boot."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import gevent
from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, StringCommand, deploy, operation
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.context import ctx_state

from gpufleet.converge.desired import (
    UNIT_DIRECTORY,
    Absent,
    Directory,
    File,
    Group,
    Package,
    Unit,
    UnitGone,
    User,
    Wanted,
)
from gpufleet.fleet.run import Here
from gpufleet.network import firewall as table
from gpufleet.network.firewall import DIRECTORY, RULES, SERVICE
from gpufleet.operations.converge import Converge, refuse
from gpufleet.planning.stage import Running
from gpufleet.remote import payload
from gpufleet.remote.facts import FirewallRules

Commands = Generator[StringCommand | FunctionCommand]

LOOK_SECONDS = 90
"""The program's own deadlines, 15 s for each of its commands, of which a healthy node needs one."""
# Under new rules a connection either comes about at once or not at all.
CONNECT_SECONDS = 30


@deploy("firewall")
def firewall(here: Here, running: Iterable[Running] = ()) -> None:
    """
    Converge the node's table to what its stages need, or to none.

    With `running` all that those stages need stays open, too. So the first half of a deploy opens
    what will be needed, and the second closes what is needed no more.
    """
    if here.settings.firewall is None:
        gone = Converge(Wanted(UnitGone(SERVICE), Absent(RULES)), watch=(RULES,))
        removed(gone, name="no rules")
        gone.units(name="no service")
        gone.files(name="no file")
        return
    text = rules(here, running)
    node = Converge(
        Wanted(
            Package("nftables"),
            *_account(here),
            Directory(DIRECTORY, mode=0o755),
            File(f"{UNIT_DIRECTORY}/{SERVICE}", table.service().encode()),
            Unit(SERVICE),
        )
    )
    node.packages(name="package")
    node.accounts(name="service account")
    node.files(name="service")
    guarded(
        node,
        text,
        here.settings.firewall.confirm_seconds,
        name="rules",
        _timeout=LOOK_SECONDS * 3 + CONNECT_SECONDS,
    )
    node.units(name="load the rules at boot")


def rules(here: Here, running: Iterable[Running] = ()) -> str:
    """Return the table that the node is to have."""
    return table.rules(
        here.stages,
        here.settings,
        ssh_port=int(host.data.get("ssh_port") or 22),
        running=running,
        fellows=here.fellows,
    )


def narrows(here: Here) -> bool:
    """Say whether something runs on the node that needs more open than what is planned does."""
    return here.settings.firewall is not None and rules(here, here.running) != rules(here)


def problems(here: Here) -> list[str]:
    """Return what is wrong with the node's firewall, in words; none is wanted: nothing."""
    if here.settings.firewall is None:
        return []
    return list(table.problems(_ask("look", rules(here))))


def _account(here: Here) -> tuple[Group | User, ...]:
    """The table names the user of vLLM, whom nft must know: as roles/vllm.py wants it."""
    if here.settings.vllm is None:
        return ()
    user = here.settings.vllm.user
    return Group(user), User(user, group=user, home="/var/lib/vllm")


@operation()
def removed(node: Converge) -> Commands:
    """Take the table away, where there was one; the unit and its file follow."""
    if not node.snapshot().file(RULES).exists:
        host.noop("there is no firewall of ours")
        return
    logger.info(
        "%s%sremove the table inet gpufleet",
        host.print_prefix,
        "" if ctx_state.get().is_executing else "would ",
    )
    # On a node whose nftables are gone there is no table either.
    yield StringCommand("nft delete table inet gpufleet 2>/dev/null || :", _timeout=LOOK_SECONDS)


@operation()
def guarded(node: Converge, text: str, confirm_seconds: int) -> Commands:
    """
    Replace the node's table, unless it is loaded and confirmed; show each line that differs.

    New rules stay if a new connection to the node comes about under them. If not, they are taken
    back at once over the one that is there, and by a timer of the node if that is cut, too.
    """
    seen = _ask("look", text)
    executing = ctx_state.get().is_executing
    if not seen or seen["error"]:
        yield from refuse((seen.get("error") or "the node's firewall could not be asked",))
        return
    if not executing and seen["canonical"] is None:
        _say(table.changes(None, text), "would load, once there is nft and the user of vLLM: ")
        yield FunctionCommand(lambda *_: True, (), {})
        return
    if seen["canonical"] is None:
        yield from refuse(("there is no nft, or no user of vLLM, on this node",))
        return
    if seen["loaded"] == seen["canonical"] and seen["saved"] and not seen["pending"]:
        host.noop("the rules are loaded")
        return
    _say(table.changes(seen["loaded"], seen["canonical"]), "" if executing else "would change ")
    if executing:
        node.forget()
    yield FunctionCommand(_replace, (text, confirm_seconds), {})


def _say(lines: Iterable[str], before: str) -> None:
    for line in lines:
        logger.info("%s%s%s", host.print_prefix, before, line)


def _replace(state: State, host: Host, text: str, seconds: int) -> bool:
    """Load the table and confirm it; return whether it stays."""
    if error := _error(_ask("apply", text, seconds)):
        logger.error("%sthe firewall's rules were not loaded: %s", host.print_prefix, error)
        return False
    if not (error := _confirmed(state, host, text, min(CONNECT_SECONDS, seconds - 10))):
        return True
    back = _error(_ask("revert", text))
    logger.error(
        "%sunder the new rules of the firewall %s: %s",
        host.print_prefix,
        error,
        f"they are taken back within {seconds} s ({back})" if back else "they were taken back",
    )
    return False


def _confirmed(state: State, host: Host, text: str, seconds: int) -> str:
    """Confirm the rules over a new connection; return why that was not possible, "" if it was."""
    if not isinstance(host.connector, SSHConnector):
        return _error(_ask("confirm", text))  # this machine itself: no rule is in between
    own, new = host.connector, type(host.connector)(state, host)
    try:
        with gevent.Timeout(seconds):
            new.connect()
        host.connector = new
        return _error(_ask("confirm", text))
    except ConnectError as error:
        return f"no new SSH connection came about ({error})"
    except gevent.Timeout:
        return f"no new SSH connection came about within {seconds} s"
    finally:
        host.connector = own
        if new.client is not None:
            new.client.close()


def _ask(action: str, text: str, seconds: int = 0) -> dict[str, Any]:
    """Return on_node/network/firewall.py's document, {} if it could not be had."""
    program = payload.program(
        "network/firewall",
        action=action,
        wanted=text,
        seconds=seconds,
        rules=RULES,
        service=SERVICE,
    )
    found: dict[str, Any] = host.get_fact(
        FirewallRules, _stdin=program, _timeout=LOOK_SECONDS, _ignore_errors=True
    )
    return found or {}


def _error(seen: dict[str, Any]) -> str:
    return str(seen["error"]) if seen else "the node did not answer"
