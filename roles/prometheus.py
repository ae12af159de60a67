"""Prometheus on a monitoring node: proven before it is told, reloaded instead of restarted."""

from __future__ import annotations

from collections.abc import Mapping

from pyinfra import host, logger
from pyinfra.api import deploy
from pyinfra.context import ctx_host, ctx_state

from gpufleet.converge.desired import Directory, File, NoOtherFiles, Package, Unit, Wanted
from gpufleet.monitoring import prometheus as scrape
from gpufleet.monitoring import render
from gpufleet.monitoring import targets as watching
from gpufleet.monitoring.prometheus import Scrape, Target
from gpufleet.monitoring.targets import Watching
from gpufleet.operations.converge import Converge
from gpufleet.operations.install_archive import installed_versions, remove_other_versions
from gpufleet.operations.validated_config import ServerConfig, reload_config, validate_config
from gpufleet.remote import payload
from gpufleet.remote.query import ask
from gpufleet.serving.unit import whole
from roles._monitoring_common import STATE, credentials, directories, install, of_archive

UNIT = "prometheus.service"
HOME = "/etc/gpufleet/prometheus"
DATA = f"{STATE}/metrics2"
LOOK_SECONDS = 30


@deploy("Prometheus")
def prometheus(node: Watching) -> None:
    """Converge the program, its unit, configuration and targets; see it all in force."""
    server = node.monitoring.prometheus
    if server is None:
        return
    for remark in scrape.unreachable(node.nodes, node.servers, node.name):
        logger.warning("%s%s", host.print_prefix, remark)
    wanted = node.scrapes(_before(node))
    named = {path: file for each in wanted for path, file in each.secrets}
    secrets = watching.secrets(named, "exporters")
    configuration = render.prometheus(node.monitoring, node.nodes, wanted)
    program = of_archive("prometheus", server.archive, ("prometheus", "promtool"))
    unit = whole(
        "prometheus/prometheus.service.j2",
        UNIT,
        started_with={"archive": program.version if program else ""},
        program=program.program("prometheus") if program else "/usr/bin/prometheus",
        home=HOME,
        data=DATA,
        retention_days=server.retention_days,
        address=scrape.at(server.listen, server.port),
    )
    files = Converge(
        Wanted(
            *directories(HOME, DATA),
            # There from the beginning: Prometheus watches no directory that comes later.
            *(Directory(f"{HOME}/{each}") for each in ("own-rules", "own-targets", "targets")),
            *(File(f"{HOME}/{path}", content) for path, content in configuration.items()),
            *credentials(HOME, secrets),
            NoOtherFiles(f"{HOME}/rules/*.yml"),
        )
    )
    targets = Converge(_files(wanted))
    running = Converge(Wanted(unit.file, Unit(UNIT, fingerprint=unit.fingerprint)))
    promtool = program.program("promtool") if program else "/usr/bin/promtool"
    configured = ServerConfig(
        unit=UNIT,
        url=f"http://{scrape.at(scrape.local(server.listen), server.port)}",
        name="prometheus",
        directory=HOME,
        check=(promtool, "check", "config", "prometheus.yml"),
        watched=("prometheus.yml", "rules", "rules/*.yml", "own-rules", "own-rules/*.yml"),
        files=configuration | render.targets(wanted),
        secrets=secrets,
    )
    install(Package("prometheus"), program, unit.file)
    validate_config(files, configured, name="proof of the configuration")
    files.files(name="configuration")
    targets.files(name="targets")
    running.units(name="service")
    reload_config(files, running, configured, name="configuration in force")
    if program:
        remove_other_versions(installed_versions(program), program, name="other versions")


@deploy("Prometheus")
def prometheus_targets(node: Watching) -> None:
    """Converge the targets alone, where there is a Prometheus of ours; it reads them by itself."""
    if node.monitoring.prometheus is None:
        return
    configuration = f"{HOME}/prometheus.yml"
    targets = Converge(_files(node.scrapes(_before(node))), watch=(configuration,))
    if targets.snapshot().file(configuration).exists:
        targets.files(name="targets")


def _files(wanted: tuple[Scrape, ...]) -> Wanted:
    """Return the files of targets, and that there are no others."""
    found = render.targets(wanted).items()
    return Wanted(
        *(File(f"{HOME}/{path}", content) for path, content in found),
        NoOtherFiles(f"{HOME}/targets/*.json"),
    )


def _before(node: Watching) -> Mapping[str, list[Target]]:
    """Return what the files of targets say now; asked for only where it counts."""
    if not node.silent:
        return {}
    program = payload.program("monitoring/target_files", directory=HOME)
    here = ctx_host.get()
    answer = ask(ctx_state.get(), [here], lambda _: program, LOOK_SECONDS, "the look at targets")
    found = answer[here.name]
    if isinstance(found, str):
        logger.warning("%s%s; known targets may be lost", host.print_prefix, found)
        return {}
    files: Mapping[str, list[Target]] = found["files"]
    return files
