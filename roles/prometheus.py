"""Run Prometheus on a monitoring node; its configuration is validated, then reloaded."""

from __future__ import annotations

from pyinfra import host, logger
from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState, Package, Unit
from gpufleet.fleet.known_targets import known_targets
from gpufleet.monitoring import prometheus_node, render, targets
from gpufleet.monitoring.prometheus import host_port, local_address, unreachable_servers
from gpufleet.monitoring.prometheus_node import HOME, UNIT
from gpufleet.monitoring.targets import MonitoringTargets
from gpufleet.operations.converge import Converge
from gpufleet.operations.install_archive import installed_versions, remove_other_versions
from gpufleet.operations.validated_config import ServerConfig, reload_config, validate_config
from roles._monitoring_common import install, of_archive


@deploy("Prometheus")
def prometheus(node: MonitoringTargets) -> None:
    """
    Converge the program, its unit, configuration and targets, and verify that they are loaded.
    """
    server = node.monitoring.prometheus
    if server is None:
        return
    for remark in unreachable_servers(node.nodes, node.servers, node.name):
        logger.warning("%s%s", host.print_prefix, remark)
    wanted = node.scrapes(known_targets(node, HOME))
    named = {path: file for each in wanted for path, file in each.secrets}
    secrets = targets.secrets(named, "exporters")
    configuration = render.prometheus(node.monitoring, node.nodes, wanted, node.measured)
    program = of_archive("prometheus", server.archive, ("prometheus", "promtool"))
    unit = prometheus_node.unit(server, program)
    files = Converge(prometheus_node.configuration_files(configuration, secrets))
    target_files = Converge(prometheus_node.target_files(wanted))
    running = Converge(DesiredState(unit.file, Unit(UNIT, fingerprint=unit.fingerprint)))
    promtool = program.program("promtool") if program else "/usr/bin/promtool"
    configured = ServerConfig(
        unit=UNIT,
        url=f"http://{host_port(local_address(server.listen), server.port)}",
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
    target_files.files(name="targets")
    running.units(name="service")
    reload_config(files, running, configured, name="configuration in force")
    if program:
        remove_other_versions(installed_versions(program), program, name="other versions")


@deploy("Prometheus")
def prometheus_targets(node: MonitoringTargets) -> None:
    """
    Converge only the targets, on a node where gpufleet runs Prometheus, which rereads them itself.
    """
    if node.monitoring.prometheus is None:
        return
    configuration = f"{HOME}/prometheus.yml"
    wanted = prometheus_node.target_files(node.scrapes(known_targets(node, HOME)))
    files = Converge(wanted, watch=(configuration,))
    if files.snapshot().file(configuration).exists:
        files.files(name="targets")
