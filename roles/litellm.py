"""LiteLLM on a node: its release built and its configuration read by it before it is restarted."""

from __future__ import annotations

from collections.abc import Mapping

from pyinfra.api import deploy

from gpufleet.artifacts import operator_files, release
from gpufleet.artifacts.release import BUILD_SECONDS, WAIT_SECONDS
from gpufleet.converge.desired import Listing, Wanted
from gpufleet.errors import FleetError
from gpufleet.monitoring.prometheus import Watched
from gpufleet.network import litellm as proxy
from gpufleet.network import litellm_node as node
from gpufleet.operations.build_release import build_release, remove_old_releases
from gpufleet.operations.converge import Converge
from gpufleet.operations.validated_config import ServerConfig, validate_config


@deploy("LiteLLM")
def litellm(nodes: Mapping[str, Watched], name: str) -> None:
    """
    Converge the node to the LiteLLM that it declares; to none, where it declares none.

    Raises `FleetError` for names that there are not, and files that cannot be read.
    """
    wanted = nodes[name].settings.litellm
    if wanted is None:
        without()
        return
    if problems := [*proxy.problems(wanted, nodes, name)]:
        raise FleetError(*problems)
    build = release.release(
        wanted, operator_files.read(wanted.lock), operator_files.read(wanted.uv_lock), proxy.PROGRAM
    )
    secrets, open_files = node.read_files(wanted, nodes, name)
    at = proxy.upstream(wanted, nodes, name)
    served = proxy.entries(nodes)
    told = proxy.configuration(wanted, proxy.names(wanted, served), served, at).files
    files = {**told, **open_files}
    unit = node.litellm_unit(wanted, build, proxy.reach(wanted, at), files, secrets)

    ground = Converge(node.required(build), watch=(build.mark,))
    ground.packages(name="packages")
    ground.accounts(name="service account")
    ground.files(name="directories, locks and program")
    build_release(
        ground, build, name=f"build release {build.id}", _timeout=BUILD_SECONDS + WAIT_SECONDS
    )
    configuration = Converge(node.litellm_files(unit, files, secrets))
    configured = ServerConfig(
        unit=proxy.UNIT,
        url="",
        name="litellm",
        directory=proxy.HOME,
        check=("/usr/bin/env", "-i", "HOME=.", *node.command(build, "--check", ".")),
        watched=(),
        files=files,
        seconds=node.CHECK_SECONDS,
    )
    validate_config(configuration, configured, name="proof of the configuration")
    configuration.files(name="configuration and unit")
    Converge(node.running_unit(wanted, unit)).units(name="service")
    releases = Converge(Wanted(Listing(build.program.releases)))
    remove_old_releases(releases, build, wanted.keep_releases, name="older releases")


def without() -> None:
    """Take away what there is of it, but for its releases and its account."""
    gone = Converge(node.unwanted(), watch=node.OURS)
    # Also where a run before was killed halfway: no secret stays.
    if any(gone.snapshot().file(each).exists for each in node.OURS):
        gone.units(name="no service")
        gone.files(name="no configuration")
