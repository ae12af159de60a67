"""roles/vllm.py and roles/prepare_vllm.py: account, release, model, a unit a stage."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import account, listens, owners, packages, services
from tests.lab.upgrade_fleet import NEW

PACKAGES = {"ca-certificates", "curl", "g++", "libnuma1", "python3-dev", "python3-venv"}
FILES = {
    "/opt/vllm": "root:root 755",
    "/opt/vllm/locks": "root:root 755",
    "/opt/vllm/releases": "root:root 755",
    "/var/lib/vllm": "root:root 755",
    "/var/lib/vllm/models": "root:root 755",
    "/usr/local/libexec/gpufleet/vllm-guard/gpufleet_guard.py": "root:root 644",
    "/usr/local/libexec/gpufleet/vllm-serve": "root:root 755",
    "/usr/local/libexec/gpufleet/vllm-rank": "root:root 755",
    "/usr/local/libexec/gpufleet/vllm-gpu-turn": "root:root 755",
    "/run/gpufleet/started": "root:root 755",
}
SECRETS = {
    "/etc/vllm": "root:root 755",
    "/etc/vllm/credentials": "root:root 700",
    "/etc/vllm/credentials/api-key": "root:root 600",
}


def test_servers_run_as_an_account_without_a_shell(gpu_node: Host) -> None:
    assert account(gpu_node, "vllm") == "vllm /var/lib/vllm /usr/sbin/nologin"
    (unit,) = units(gpu_node)
    assert gpu_node.check_output(f"systemctl show -P User {unit}") == "vllm"


def test_what_vllm_needs_is_installed(gpu_node: Host) -> None:
    assert packages(gpu_node, *PACKAGES).keys() == PACKAGES


def test_releases_and_models_are_roots(gpu_node: Host) -> None:
    assert owners(gpu_node, *FILES) == FILES
    releases = gpu_node.file("/opt/vllm/releases").listdir()
    assert [each for each in releases if each.startswith(f"{NEW}-")]


def test_keys_are_readable_by_root_alone(gpu_node: Host) -> None:
    assert owners(gpu_node, *SECRETS) == SECRETS
    others = gpu_node.check_output("find /etc/vllm/credentials -type f ! -perm 600")
    assert others == ""


def test_the_stages_unit_runs_also_after_a_boot(gpu_node: Host) -> None:
    (unit,) = units(gpu_node)
    assert services(gpu_node, unit) == {unit: "active enabled"}
    stage = unit.removeprefix("vllm-").removesuffix(".service")
    wanted = {
        f"/etc/systemd/system/{unit}": "root:root 644",
        f"/var/lib/vllm/{stage}": "vllm:vllm 750",
        f"/var/cache/vllm/{stage}": "vllm:vllm 750",
        f"/run/vllm/{stage}": "vllm:vllm 750",
        f"/run/gpufleet/started/{unit}": "root:root 600",
    }
    assert owners(gpu_node, *wanted) == wanted


def test_the_server_listens(server_node: Host) -> None:
    assert "*:8000" in listens(server_node)


def units(node: Host) -> list[str]:
    """Return the units of stages that run."""
    listed = node.check_output(
        "systemctl list-units --plain --no-legend --state=active 'vllm-*.service'"
    )
    return [line.split()[0] for line in listed.splitlines()]
