"""`gpufleet ...`: looks at a fleet before anything is done with it, and changes it under load.

With `--record` what was found is written on the nodes, for their exporters. What changes a node is
named for it: `upgrade`, `rollback`, and marks as `cordon`; all else only looks.
Thin: reads files, calls the modules that know, prints. Mistakes of the operator end in one line
`error: ...` each on stderr and status 2, never in a traceback; Ctrl-C ends in status 130.
"""

from __future__ import annotations

import atexit
import gc
from importlib import import_module

import click

from gpufleet.cli.common_options import INTERRUPTED, print_error
from gpufleet.errors import FleetError

# Every command: where it is, and the line of it in `gpufleet --help`. One is loaded when it is
# named, so that none slows the others down.
COMMANDS = {
    "bundle": (
        "gpufleet.cli.bundle_command:bundle",
        "A mirror of all that nodes download, for a network without the internet.",
    ),
    "check": (
        "gpufleet.cli.check_command:check",
        "Say whether the nodes of INVENTORY are fit to serve. Reads only, installs nothing.",
    ),
    "cordon": (
        "gpufleet.cli.drain_command:cordon",
        "Place nothing new on a node; what runs there stays.",
    ),
    "deploy": (
        "gpufleet.cli.deploy_command:deploy",
        "Run a deploy on the nodes of INVENTORY: vllm, node, gateway, monitoring ...",
    ),
    "drain": (
        "gpufleet.cli.drain_command:drain",
        "Cordon a node, send it no requests, and wait until it has none.",
    ),
    "drift": (
        "gpufleet.cli.drift_command:drift",
        "What on the nodes is not as declared, now or after the next reboot.",
    ),
    "flags": (
        "gpufleet.cli.flags_command:flags",
        "What vLLM's flags are in each release, and a command line judged by it.",
    ),
    "import": (
        "gpufleet.cli.import_command:import_",
        "What you have (models.yml, vllm serve, docker run, compose) as settings.",
    ),
    "init": (
        "gpufleet.cli.init_command:init",
        "Write a fleet's own directory from the names of its hosts.",
    ),
    "inventory": (
        "gpufleet.cli.inventory_command:inventory",
        "Show every value of the nodes of INVENTORY, or of one NODE, and the line that set it.",
    ),
    "lab": ("gpufleet.cli.lab_command:lab", "Real Linux nodes with simulated GPUs."),
    "lock": (
        "gpufleet.cli.lock_command:lock",
        "What a group's nodes run, written down so that they keep to it.",
    ),
    "logs": (
        "gpufleet.cli.logs_command:logs",
        "Show the journals of the ranks of REPLICA as one, by time.",
    ),
    "monitoring": (
        "gpufleet.cli.monitoring_command:monitoring",
        "Rules, dashboards and scraping for servers of yours, and silences of alerts.",
    ),
    "packages": (
        "gpufleet.cli.packages_command:packages",
        "Locks of the packages that nodes install, and what is known of them.",
    ),
    "plan": (
        "gpufleet.cli.plan_command:plan",
        "Show which GPUs of which node would serve what, and why. Changes nothing.",
    ),
    "presets": (
        "gpufleet.cli.presets_command:presets",
        "Show the presets that `presets` of a model may name, or every value of one with reasons.",
    ),
    "probe": (
        "gpufleet.cli.probe_command:probe",
        "Ask the nodes of INVENTORY what they are. Installs nothing on them.",
    ),
    "reach": (
        "gpufleet.cli.reach_command:reach",
        "Have the nodes of REPLICA, or of all that span nodes, prove that they reach each other.",
    ),
    "recipes": (
        "gpufleet.cli.recipes_command:recipes",
        "With what others serve a model, as settings to copy.",
    ),
    "rollback": (
        "gpufleet.cli.upgrade_command:rollback",
        "Bring every replica that the last upgrade changed back to what it was.",
    ),
    "settings": (
        "gpufleet.cli.settings_command:settings",
        "Look up settings of group_vars: type, unit, default, example.",
    ),
    "size": (
        "gpufleet.cli.size_command:size",
        "What a model takes on one GPU, and whether it starts with these options.",
    ),
    "status": (
        "gpufleet.cli.status_command:status",
        "Say whether the replicas on the nodes of INVENTORY serve. Reads only, installs nothing.",
    ),
    "topology": (
        "gpufleet.cli.topology_command:topology",
        "Show what joins the GPUs of a node, and how far tensor parallelism may go on it.",
    ),
    "uncordon": (
        "gpufleet.cli.drain_command:uncordon",
        "Let new replicas be placed on a node again.",
    ),
    "undrain": (
        "gpufleet.cli.drain_command:undrain",
        "Send requests to a node's replicas again.",
    ),
    "upgrade": (
        "gpufleet.cli.upgrade_command:upgrade",
        "Bring a fleet to what is declared while it serves, wave by wave.",
    ),
    "validate": (
        "gpufleet.cli.validate_command:validate",
        "Check settings, files, flags and plan without the nodes.",
    ),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are named."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command; None: there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write a line for each command, and import none."""
        width = formatter.width - 6 - max(map(len, COMMANDS))
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, click.Command(name, help=line).get_short_help_str(width))
                    for name, (_, line) in sorted(COMMANDS.items())
                ]
            )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpufleet")
def gpufleet() -> None:
    """Look at a GPU fleet: what is declared for it, what it is, what it would serve."""


def main() -> int:
    """Run the command line; return the exit status."""
    # What is imported stays: looking through it again and again took a fifth of a plan's time.
    gc.set_threshold(100_000, 20, 50)
    atexit.register(gc.freeze)
    try:
        status = gpufleet.main(prog_name="gpufleet", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except FleetError as error:
        print_error(error)
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    return status if isinstance(status, int) else 0
