"""roles/gateway.py: HAProxy under a unit of its own, with keys that root alone reads."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import listens, owners, packages, services
from tests.lab.walk import TlsFleet

SERVICE, PACKAGED = "gpufleet-gateway.service", "haproxy.service"
FILES = {
    "/usr/local/libexec/gpufleet/gateway-state": "root:root 755",
    f"/etc/systemd/system/{SERVICE}": "root:root 644",
    "/etc/gpufleet/gateway": "root:root 700",
    "/etc/gpufleet/gateway/form-model.lua": "root:root 644",
    "/etc/gpufleet/gateway/haproxy.cfg": "root:root 644",
    "/etc/gpufleet/gateway/keys.map": "root:root 644",
    "/etc/gpufleet/gateway/models.map": "root:root 644",
    "/etc/gpufleet/gateway/upstream.map": "root:root 600",
    "/var/lib/gpufleet/gateway": "root:root 755",
    "/var/lib/gpufleet/textfile/certificate-gateway.prom": "root:root 644",
    "/run/gpufleet-gateway": "root:root 700",
}


def test_it_runs_also_after_a_boot_and_the_packages_own_unit_never(gateway_node: Host) -> None:
    assert packages(gateway_node, "haproxy")
    assert services(gateway_node, SERVICE, PACKAGED) == {
        SERVICE: "active enabled",
        PACKAGED: "inactive masked",
    }


def test_clients_and_prometheus_reach_it(gateway_node: Host) -> None:
    assert {"*:8443", "*:8405"} <= listens(gateway_node)


def test_keys_of_servers_are_readable_by_root_alone(gateway_node: Host) -> None:
    assert owners(gateway_node, *FILES) == FILES
    certificates = gateway_node.check_output("stat -c '%U %a' /etc/gpufleet/gateway/*.pem")
    assert certificates.splitlines() == ["root 600"]


def test_the_node_exporter_is_told_when_its_certificate_ends(gateway_node: Host) -> None:
    at = "/etc/gpufleet/gateway/tls.pem"
    until = gateway_node.check_output(f"openssl x509 -noout -enddate -in {at}")
    end = gateway_node.check_output(f"date -d '{until.removeprefix('notAfter=')}' +%s")
    written = gateway_node.check_output("cat /var/lib/gpufleet/textfile/certificate-gateway.prom")
    assert written.splitlines()[-1] == (
        f'gpufleet_certificate_end_timestamp_seconds{{path="{at}",use="gateway"}} {end}'
    )


def test_it_has_the_hash_of_a_clients_key_and_not_the_key(
    gateway_node: Host, walk: TlsFleet
) -> None:
    found = gateway_node.run(f"grep -rl {walk.key_of_clients} /etc/gpufleet")
    assert found.stdout == ""
