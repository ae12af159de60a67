"""Check the flags of node_exporter with the program itself, before the unit is written."""

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

# With `--version` after all other flags, the program parses the flags and does not start.
CHECK_SECONDS = 30


@operation()
def check_exporter_flags(
    node: Converge, rendered: UnitFile, wanted: NodeExporter, access: Access
) -> Generator[StringCommand]:
    """
    Let the program parse its flags before a unit with different flags is written.

    Releases have different flags: 1.3 has no --web.config.file, and collectors change. With an
    unknown flag, the exporter would exit when it starts.
    """
    seen = node.snapshot().file(rendered.path)
    if seen.exists and seen.sha256 == rendered.file.sha256:
        host.noop("the exporter accepts its flags")
        return
    if not ctx_state.get().is_executing:
        log_dry_run(f"check which flags {program(wanted)} accepts")
    node.mark_read_only()
    yield StringCommand("sh", "-c", QuoteString(flag_check_script(wanted, access)))
