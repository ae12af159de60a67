"""Check a node exporter's flags with the program itself, before its unit is written."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand, operation
from pyinfra.context import ctx_state

from gpufleet.monitoring.exporters import Access
from gpufleet.monitoring.node_exporter import flag_check_script, program
from gpufleet.operations.converge import Converge, log_dry_run
from gpufleet.serving.unit import UnitFile
from gpufleet.settings.monitoring_settings import NodeExporter

# `--version` after all other flags: the program parses these and starts nothing.
CHECK_SECONDS = 30


@operation()
def check_exporter_flags(
    node: Converge, rendered: UnitFile, wanted: NodeExporter, access: Access
) -> Generator[StringCommand]:
    """
    Let the program parse its flags before a unit with other flags is written.

    The flags of releases differ: 1.3 has no --web.config.file, and collectors change. Because of an
    unknown flag the exporter would exit at its start.
    """
    seen = node.snapshot().file(rendered.path)
    if seen.exists and seen.sha256 == rendered.file.sha256:
        host.noop("the exporter accepts its flags")
        return
    if not ctx_state.get().is_executing:
        log_dry_run(f"check which flags {program(wanted)} accepts")
    node.mark_read_only()
    yield StringCommand("sh", "-c", QuoteString(flag_check_script(wanted, access)))
