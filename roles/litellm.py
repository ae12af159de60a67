"""Run LiteLLM on a node; build its release and validate its configuration before a restart."""

from __future__ import annotations

from collections.abc import Mapping

from pyinfra.api import deploy

from gpufleet.artifacts import operator_files, release
from gpufleet.artifacts.release import BUILD_SECONDS, WAIT_SECONDS
from gpufleet.converge.desired import DesiredState, Listing
from gpufleet.errors import FleetError
from gpufleet.network import litellm_node
from gpufleet.network.litellm import (
    HOME,
    PROGRAM,
    UNIT,
    allowed_networks,
    configuration,
    entries,
    names,
    problems,
    upstream,
)
from gpufleet.operations.build_release import build_release, remove_old_releases
from gpufleet.operations.converge import Converge
from gpufleet.operations.validated_config import ServerConfig, validate_config
from gpufleet.settings.node_variables import NodeVars


@deploy("LiteLLM")
def litellm(nodes: Mapping[str, NodeVars], name: str) -> None:
    """
    Converge the node to its declared LiteLLM, or remove LiteLLM if none is declared.

    Raises `FleetError` for unknown names and unreadable files.
    """
    wanted = nodes[name].settings.litellm
    if wanted is None:
        without()
        return
    if found := [*problems(wanted, nodes, name)]:
        raise FleetError(*found)
    build = release.release(
        wanted, operator_files.read(wanted.lock), operator_files.read(wanted.uv_lock), PROGRAM
    )
    secrets, open_files = litellm_node.read_files(wanted, nodes, name)
    at = upstream(wanted, nodes, name)
    served = entries(nodes)
    told = configuration(wanted, names(wanted, served), served, at).files
    files = {**told, **open_files}
    unit = litellm_node.litellm_unit(wanted, build, allowed_networks(wanted, at), files, secrets)

    ground = Converge(litellm_node.required_state(build), watch=(build.mark,))
    ground.packages(name="packages")
    ground.accounts(name="service account")
    ground.files(name="directories, locks and program")
    build_release(
        ground, build, name=f"build release {build.id}", _timeout=BUILD_SECONDS + WAIT_SECONDS
    )
    configured = Converge(litellm_node.litellm_files(unit, files, secrets))
    server = ServerConfig(
        unit=UNIT,
        url="",
        name="litellm",
        directory=HOME,
        check=("/usr/bin/env", "-i", "HOME=.", *litellm_node.command(build, "--check", ".")),
        watched=(),
        files=files,
        seconds=litellm_node.CHECK_SECONDS,
    )
    validate_config(configured, server, name="proof of the configuration")
    configured.files(name="configuration and unit")
    Converge(litellm_node.running_unit(wanted, unit)).units(name="service")
    releases = Converge(DesiredState(Listing(build.program.releases)))
    remove_old_releases(releases, build, wanted.keep_releases, name="older releases")


def without() -> None:
    """Remove LiteLLM except its releases and its account."""
    gone = Converge(litellm_node.absent_state(), watch=litellm_node.OURS)
    # This also completes an earlier removal that was killed, so that no secret stays.
    if any(gone.snapshot().file(each).exists for each in litellm_node.OURS):
        gone.units(name="no service")
        gone.files(name="no configuration")
