"""Run Alertmanager on a monitoring node; its configuration is validated before a reload."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet import node_paths
from gpufleet.converge.desired import DesiredState, File, Package, Unit
from gpufleet.monitoring import prometheus, targets
from gpufleet.monitoring.alertmanager import alertmanager_yml, secret_files, webhooks
from gpufleet.monitoring.server_files import ACCOUNT, STATE, credentials, directories
from gpufleet.monitoring.targets import MonitoringTargets
from gpufleet.operations.converge import Converge
from gpufleet.operations.install_archive import installed_versions, remove_other_versions
from gpufleet.operations.validated_config import ServerConfig, reload_config, validate_config
from gpufleet.serving.unit import whole_unit
from roles._monitoring_common import install, of_archive

UNIT = "prometheus-alertmanager.service"
HOME = node_paths.ALERTMANAGER
DATA = f"{STATE}/alertmanager"


@deploy("Alertmanager")
def alertmanager(node: MonitoringTargets) -> None:
    """Converge the program, its unit and its configuration, and verify that it is loaded."""
    server = node.monitoring.alertmanager
    if server is None:
        return
    program = of_archive("alertmanager", server.archive, ("alertmanager", "amtool"))
    secrets = targets.secrets(secret_files(server), "monitoring.alertmanager")
    # Alertmanager 0.25 of Debian cannot read a webhook's URL from a file, so the configuration has
    # this URL and is secret too. The publisher's present releases read the URL from its file.
    inline = () if program else webhooks(server)
    urls = {path: secrets[path].decode().strip() for path in inline}
    text = alertmanager_yml(server, urls, f"{HOME}/").encode()
    unit = whole_unit(
        "alertmanager/prometheus-alertmanager.service.j2",
        UNIT,
        started_with={"archive": program.version if program else ""},
        program=program.program("alertmanager") if program else "/usr/bin/prometheus-alertmanager",
        home=HOME,
        data=DATA,
        address=prometheus.host_port(server.listen, server.port),
    )
    kept = {path: content for path, content in secrets.items() if path not in urls}
    configuration = File(
        f"{HOME}/alertmanager.yml", text, group=ACCOUNT, mode=0o640, secret=bool(urls)
    )
    files = Converge(
        DesiredState(*directories(HOME, DATA), configuration, *credentials(HOME, kept))
    )
    running = Converge(DesiredState(unit.file, Unit(UNIT, fingerprint=unit.fingerprint)))
    configured = ServerConfig(
        unit=UNIT,
        url=f"http://{prometheus.host_port(prometheus.local_address(server.listen), server.port)}",
        name="alertmanager",
        directory=HOME,
        check=(
            program.program("amtool") if program else "/usr/bin/amtool",
            *("check-config", "alertmanager.yml"),
        ),
        watched=("alertmanager.yml",),
        files={"alertmanager.yml": text},
        secrets=secrets,
    )
    install(Package("prometheus-alertmanager"), program, unit.file)
    validate_config(files, configured, name="proof of the configuration")
    files.files(name="configuration")
    running.units(name="service")
    reload_config(files, running, configured, name="configuration in force")
    if program:
        remove_other_versions(installed_versions(program), program, name="other versions")
