"""Load a node's firewall rules, and keep them only if the node can still be reached."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import gevent
from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, StringCommand, operation
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.context import ctx_state

from gpufleet.fleet.run import NodePlan
from gpufleet.network.firewall import RULES, SERVICE, changes, problems, render_rules
from gpufleet.operations.converge import Converge, announce, log_dry_run, refuse
from gpufleet.planning.stage import Running
from gpufleet.remote import payload
from gpufleet.remote.answer_forms import form_problem
from gpufleet.remote.facts import FirewallRules

Commands = Generator[StringCommand | FunctionCommand]

LOOK_SECONDS = 90
"""
Time limit in seconds of the program on the node.

Each of its commands has a limit of 15 s. Normally the program needs a second.
"""

# With the new rules, a connection succeeds at once or not at all.
CONNECT_SECONDS = 30


def node_rules(here: NodePlan, running: Iterable[Running] = ()) -> str:
    """Return the nftables table that the node must have."""
    return render_rules(
        here.stages,
        here.settings,
        ssh_port=int(host.data.get("ssh_port") or 22),
        running=running,
        fellows=here.fellows,
    )


def is_narrowed(here: NodePlan) -> bool:
    """Return whether the running stages need open ports that the planned stages do not need."""
    return here.settings.firewall is not None and node_rules(here, here.running) != node_rules(here)


@operation()
def remove_firewall(node: Converge) -> Commands:
    """Remove the table if it exists. Later operations remove the unit and its file."""
    if not node.snapshot().file(RULES).exists:
        host.noop("there is no gpufleet firewall")
        return
    announce("remove the table inet gpufleet")
    # A node without nftables has no table either.
    yield StringCommand("nft delete table inet gpufleet 2>/dev/null || :", _timeout=LOOK_SECONDS)


@operation()
def apply_firewall(node: Converge, text: str, confirm_seconds: int) -> Commands:
    """
    Replace the node's table unless it is loaded and confirmed.

    Show each line that differs. The new rules stay if a new connection to the node succeeds while
    they are loaded. Otherwise, the rules are undone immediately over the existing connection. If
    that connection is cut as well, a timer on the node undoes the rules.
    """
    seen = _ask("look", text)
    executing = ctx_state.get().is_executing
    if not seen or seen["error"]:
        yield from refuse((seen.get("error") or "the node's firewall could not be read",))
        return
    if not executing and seen["canonical"] is None:
        for line in changes(None, text):
            log_dry_run(f"load, when nft and the user of vLLM exist: {line}")
        yield FunctionCommand(lambda *_: True, (), {})
        return
    if seen["canonical"] is None:
        yield from refuse(("the node has no nft, or no user for vLLM",))
        return
    if seen["loaded"] == seen["canonical"] and seen["saved"] and not seen["pending"]:
        host.noop("the rules are loaded")
        return
    for line in changes(seen["loaded"], seen["canonical"]):
        if executing:
            logger.info("%s%s", host.print_prefix, line)
        else:
            log_dry_run(f"change {line}")
    if executing:
        node.forget()
    yield FunctionCommand(_replace, (text, confirm_seconds), {})


def _replace(state: State, host: Host, text: str, seconds: int) -> bool:
    """Load the table and confirm it. Return whether it stays."""
    if error := _error(_ask("apply", text, seconds)):
        logger.error("%sthe firewall's rules were not loaded: %s", host.print_prefix, error)
        return False
    if not (error := _confirm(state, host, text, min(CONNECT_SECONDS, seconds - 10))):
        return True
    back = _error(_ask("revert", text))
    logger.error(
        "%swith the new rules of the firewall, %s: %s",
        host.print_prefix,
        error,
        f"the node rolls the rules back within {seconds} s ({back})"
        if back
        else "the rules were rolled back",
    )
    return False


def _confirm(state: State, host: Host, text: str, seconds: int) -> str:
    """Confirm the rules over a new connection. Return the problem, or "" if there is none."""
    if not isinstance(host.connector, SSHConnector):
        return _error(
            _ask("confirm", text)
        )  # this machine itself: no rule applies to the connection
    own, new = host.connector, type(host.connector)(state, host)
    try:
        with gevent.Timeout(seconds):
            new.connect()
        host.connector = new
        return _error(_ask("confirm", text))
    except ConnectError as error:
        return f"no new SSH connection succeeded ({error})"
    except gevent.Timeout:
        return f"no new SSH connection succeeded within {seconds} s"
    finally:
        host.connector = own
        if new.client is not None:
            new.client.close()


def _ask(action: str, text: str, seconds: int = 0) -> dict[str, Any]:
    """Return the document of on_node/network/firewall.py, or {} if there was no answer."""
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
    if found and (problem := form_problem(program.name, found)):
        return {"error": f"{host.name}: {problem}"}
    return found or {}


def _error(seen: dict[str, Any]) -> str:
    return str(seen["error"]) if seen else "the node did not answer"


def firewall_problems(text: str) -> list[str]:
    """Return the differences between the current node's firewall and these rules, as sentences."""
    return list(problems(_ask("look", text)))
