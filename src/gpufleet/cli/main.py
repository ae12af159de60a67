"""The `gpufleet` command: plan, check, deploy and upgrade a fleet of vLLM servers.

With `--record`, the findings are written to the nodes, for the nodes' exporters. Commands that
change a node are named after the change (`upgrade`, `rollback`, `cordon`). All other commands only
read. Thin: reads files, calls other packages, prints. Each mistake of the operator is printed on
stderr as a line that begins with `error:`, and the exit status is 2, without a traceback. After
Ctrl-C, the exit status is 130.
"""

from __future__ import annotations

import atexit
import gc
from importlib import import_module

import click

from gpufleet.cli.common_options import INTERRUPTED, print_error
from gpufleet.errors import FleetError

# Every command: its function, and its line in `gpufleet --help`. A command is imported when it is
# used, so that it does not slow down the others.
COMMANDS = {
    "batch": (
        "gpufleet.cli.batch_command:batch",
        "Send a file of requests beside users' traffic.",
    ),
    "bundle": (
        "gpufleet.cli.bundle_command:bundle",
        "Mirror all downloads, for networks without internet access.",
    ),
    "check": (
        "gpufleet.cli.check_command:check",
        "Check whether the nodes are fit to serve. Read-only.",
    ),
    "completion": (
        "gpufleet.cli.completion_command:completion",
        "Print the script that completes commands in a shell.",
    ),
    "cordon": (
        "gpufleet.cli.drain_command:cordon",
        "Place no more replicas on a node. Running replicas stay.",
    ),
    "deploy": (
        "gpufleet.cli.deploy_command:deploy",
        "Run a deploy: vllm, node, gateway, monitoring ...",
    ),
    "docs": (
        "gpufleet.cli.docs_command:docs",
        "Print a documentation page, or list all pages.",
    ),
    "doctor": (
        "gpufleet.cli.doctor_command:doctor",
        "Explain what is wrong with a fleet or in logs. Read-only.",
    ),
    "drain": (
        "gpufleet.cli.drain_command:drain",
        "Cordon a node, and wait for its requests to finish.",
    ),
    "drift": (
        "gpufleet.cli.drift_command:drift",
        "Show where nodes differ from their declaration. Read-only.",
    ),
    "flags": (
        "gpufleet.cli.flags_command:flags",
        "Look up vLLM's flags, and check a command line.",
    ),
    "import": (
        "gpufleet.cli.import_command:import_",
        "Convert scripts, manifests and charts to settings.",
    ),
    "init": (
        "gpufleet.cli.init_command:init",
        "Create a fleet's project directory from host names.",
    ),
    "inventory": (
        "gpufleet.cli.inventory_command:inventory",
        "Show every variable of the nodes, and where it is set.",
    ),
    "lab": ("gpufleet.cli.lab_command:lab", "Run real Linux nodes with simulated GPUs."),
    "lock": (
        "gpufleet.cli.lock_command:lock",
        "Record the versions that a group's nodes must keep.",
    ),
    "logs": (
        "gpufleet.cli.logs_command:logs",
        "Show the logs of a replica's ranks, merged by time.",
    ),
    "measure": (
        "gpufleet.cli.measure_command:measure",
        "Measure how many requests per second a model can serve.",
    ),
    "monitoring": (
        "gpufleet.cli.monitoring_command:monitoring",
        "Write rules and dashboards, and silence alerts.",
    ),
    "packages": (
        "gpufleet.cli.packages_command:packages",
        "Lock the packages of nodes, and look up advisories.",
    ),
    "plan": (
        "gpufleet.cli.plan_command:plan",
        "Show which GPUs each model would use, and why.",
    ),
    "preflight": (
        "gpufleet.cli.preflight_command:preflight",
        "Show what is not ready for users, with proof. Read-only.",
    ),
    "presets": (
        "gpufleet.cli.presets_command:presets",
        "Show all presets, or the values of one with reasons.",
    ),
    "probe": (
        "gpufleet.cli.probe_command:probe",
        "Read the nodes' hardware and software. Installs nothing.",
    ),
    "reach": (
        "gpufleet.cli.reach_command:reach",
        "Test that the nodes of a replica reach each other.",
    ),
    "recipes": (
        "gpufleet.cli.recipes_command:recipes",
        "Show vLLM's recipes for a model, as settings to copy.",
    ),
    "report": (
        "gpufleet.cli.report_command:report",
        "Describe the fleet on one page, for people without access.",
    ),
    "rollback": (
        "gpufleet.cli.upgrade_command:rollback",
        "Restore what the last upgrade replaced.",
    ),
    "settings": (
        "gpufleet.cli.settings_command:settings",
        "Look up the type, unit, default and example of settings.",
    ),
    "size": (
        "gpufleet.cli.size_command:size",
        "Estimate a model's GPU memory, and whether vLLM starts.",
    ),
    "status": (
        "gpufleet.cli.status_command:status",
        "Show whether the replicas serve. Read-only.",
    ),
    "topology": (
        "gpufleet.cli.topology_command:topology",
        "Show how a node's GPUs are linked, for tensor parallelism.",
    ),
    "uncordon": (
        "gpufleet.cli.drain_command:uncordon",
        "Allow replicas to be placed on a node again.",
    ),
    "undrain": (
        "gpufleet.cli.drain_command:undrain",
        "Send requests to a node's replicas again.",
    ),
    "upgrade": (
        "gpufleet.cli.upgrade_command:upgrade",
        "Apply changed settings to a serving fleet, in waves.",
    ),
    "validate": (
        "gpufleet.cli.validate_command:validate",
        "Check settings, files, flags and plan without nodes.",
    ),
}

# The sections of `gpufleet --help`, each in the order in which commands are used.
GROUPS = {
    "Look": (
        *("inventory", "settings", "presets", "flags", "probe", "check", "topology"),
        *("status", "logs", "doctor", "drift", "report", "docs"),
    ),
    "Plan": ("init", "recipes", "import", "size", "lock", "packages", "validate", "plan"),
    "Change": ("bundle", "deploy", "upgrade", "rollback"),
    "Operate": (
        "cordon",
        "uncordon",
        "drain",
        "undrain",
        "reach",
        "measure",
        "batch",
        "preflight",
        "monitoring",
    ),
    "Lab and shell": ("lab", "completion"),
}
OTHERS = "Others"
"""The title for commands that belong to no group."""


class LazyGroup(click.Group):
    """A group of commands that imports a command only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return a command, or return None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write one line of help for each command, without importing the commands."""
        named = {name for names in GROUPS.values() for name in names}
        others = tuple(sorted(COMMANDS.keys() - named))
        width = max(map(len, COMMANDS))
        for title, names in {**GROUPS, OTHERS: others}.items():
            if found := [(name.ljust(width), COMMANDS[name][1]) for name in names]:
                with formatter.section(title):
                    formatter.write_dl(found)


# The names of types in click's message "'95%' is not a valid ...".
click.FloatRange.name, click.IntRange.name = "number (as 0.95)", "whole number"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpufleet")
def gpufleet() -> None:
    """Plan, check, deploy and upgrade a fleet of vLLM servers."""


def main() -> int:
    """Run the command line, and return the exit status."""
    # Collect garbage less often. Imported modules are never garbage, but each collection searches
    # them, which took a fifth of a plan's time.
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
