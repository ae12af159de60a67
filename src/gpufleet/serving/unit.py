"""
Render the systemd unit of a stage. Pure, except that this module reads `templates/`.

A unit has the stage's whole configuration, one flag per line. `systemctl cat` therefore shows the
whole configuration, and a diff of two units shows the whole change. Secrets are the exception: the
unit only names their files.

All values are escaped with `systemd_quote`. Names need no escaping, because they match patterns
without special characters (`settings.ModelName`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gpufleet import node_paths
from gpufleet.artifacts.model_files import model_directory
from gpufleet.artifacts.release import RELEASES
from gpufleet.converge.desired import UNIT_DIRECTORY, File, started_line
from gpufleet.converge.quoting import systemd_quote
from gpufleet.engines.engine import engine
from gpufleet.planning.multinode import launch
from gpufleet.planning.stage import Stage
from gpufleet.remote import payload
from gpufleet.serving.credentials import API_KEY, variable_credentials
from gpufleet.settings.serving_settings import EngineSettings, Served
from gpufleet.templates import TEMPLATES, load_template, read_template

RANK = node_paths.RANK
"""Path of `on_node/rank/rank.py` on nodes, the main process of a multi-node rank."""
LAUNCHER = node_paths.LAUNCHER
"""Path of `templates/vllm/vllm-serve.sh` on nodes."""
VARIABLES = node_paths.VARIABLES
"""Path of `templates/vllm/vllm-variables.sh` on nodes whose stages have `environment_files`."""
GUARD = f"{node_paths.GUARD}/gpufleet_guard.py"
"""Path of `on_node/serving/guard.py` on nodes. Servers with an API key load this program."""
GPU_TURN_PROGRAM = "serving/gpu_turn"
"""The source of the program at `node_paths.GPU_TURN` on nodes."""


@dataclass(frozen=True)
class UnitFile:
    """The required content of a unit file or drop-in on the node."""

    unit: str
    path: str
    content: str
    fingerprint: str
    """SHA-256 over everything with which the process is started. A change restarts the unit."""

    @property
    def file(self) -> File:
        """
        Return the unit as a desired file.

        Root owns the file, and all users can read it, because it has no secret.
        """
        return File(self.path, self.content.encode())


# The unit of a stage


def render_unit(
    stage: Stage,
    model: Served,
    settings: EngineSettings,
    *,
    release: str,
    toolkit: str | None = None,
    credentials: Mapping[str, str] | None = None,
    templates: Path = TEMPLATES,
) -> UnitFile:
    """
    Return the unit that runs `stage` with the release whose id is `release`.

    `toolkit` is `cuda.toolkit` of the node, for example "13-0". `credentials` has the SHA-256 of
    the files in /etc/vllm/credentials, by name, so that a changed key causes a restart. Raises
    `FleetError` for arguments and variables that a process cannot have.
    """
    server = engine(settings.engine)
    hashes = dict(credentials or {})
    open_without = stage.servers or not stage.group
    if settings.api_key_file is not None and open_without and API_KEY not in hashes:
        # Without the credential the launcher would start an open endpoint.
        raise ValueError(f"{stage.id} should have an API key, but its hash is missing")
    variables = server.environment(stage, model, settings, release, toolkit)
    secret = variable_credentials(stage, model, hashes)
    if missing := {*settings.environment_files, *model.environment_files} - {
        *(name.split(".")[1] for name in secret),
        *model.environment,
    }:
        raise ValueError(f"{stage.id} should have {missing}, but their hashes are missing")
    directory, files = f"{RELEASES}/{release}", model_directory(model)
    own = stage.group is None or server.launcher.of_ranks
    guarded = node_paths.GUARD in variables.get("PYTHONPATH", "")
    started_with: dict[str, str | bytes] = {
        "release": release,
        "launcher": server.launcher.content(templates),
        **({"rank": payload.archive("rank/rank")} if stage.group else {}),
        **({"variables": read_template("vllm/vllm-variables.sh", templates)} if secret else {}),
        **({"guard": payload.source("serving/guard")} if guarded else {}),
        **({"turn": payload.archive(GPU_TURN_PROGRAM)} if stage.gpu_share is not None else {}),
        **{f"credential {name}": digest for name, digest in hashes.items()},
    }
    return _render(
        "vllm/vllm.service.j2",
        stage.unit,
        f"{UNIT_DIRECTORY}/{stage.unit}",
        started_with,
        templates,
        stage=stage,
        model=model,
        title=server.title,
        user=settings.user,
        cuda=settings.device == "cuda",
        environment=[
            systemd_quote(f"{name}={value}", command=False) for name, value in variables.items()
        ],
        arguments=argument_lines(stage, model, settings, release=release),
        program=RANK if stage.group else f"{directory}/{server.program}",
        credentials=sorted(hashes),
        stop_seconds=stop_seconds(model),
        launcher=" ".join(
            [
                *([VARIABLES] if secret else []),
                *(server.launcher.words(directory) if own else ("/usr/bin/env",)),
                *_turn(stage, model, settings),
            ]
        ),
        release_directory=directory,
        model_directory=systemd_quote(files, command=False),
        protect_home="read-only" if _is_in_a_home(files) else "yes",
    )


def _turn(stage: Stage, model: Served, settings: EngineSettings) -> tuple[str, ...]:
    """
    Return the words in front of a server's program that delay its start on a shared GPU.

    The server then starts when it is its turn. Without a shared GPU, the result is empty.
    """
    if stage.gpu_share is None:
        return ()
    url = f"http://{local_address(settings.listen)}:{stage.port}"
    folder = f"{node_paths.GPU_TURNS}/{stage.gpu_uuids[0]}"
    return node_paths.GPU_TURN, folder, stage.id, url, str(model.start_seconds)


def local_address(listen: str) -> str:
    """Return the node's own address for an endpoint that listens on `listen`."""
    return "127.0.0.1" if listen in {"0.0.0.0", "::"} else listen  # noqa: S104


def stop_seconds(model: Served) -> int:
    """
    Return TimeoutStopSec= of the model's units, in seconds.

    The limit is the sum of the time for the drain, 5 s that vLLM gives its workers
    (VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS; SGLang gives them up to 15 s), and 25 s to exit. After
    that, systemd kills the remaining processes.
    """
    return model.drain_seconds + 30


def argument_lines(
    stage: Stage, model: Served, settings: EngineSettings, *, release: str = ""
) -> list[str]:
    """
    Return the lines of ExecStart= after the program, quoted for systemd.

    The program is the engine's program, for example `vllm serve`. In a multi-node replica, it is
    the rank's program, which starts the engine's program.
    """
    server = engine(settings.engine)
    said = [line for _, line in server.arguments(stage, model, settings)]
    directory = f"{RELEASES}/{release}"
    if stage.group:
        said = launch.command(
            stage,
            model,
            server.rank(stage, model, settings),
            dict(stage.group.networks),
            port=stage.group.cluster_port,
            same={
                "release": release,
                "model": model.revision or model.model,
                "fingerprint": replica_fingerprint(stage, model, settings),
            },
            programs=f"{directory}/bin",
            server=(
                *(() if server.launcher.of_ranks else server.launcher.words(directory)),
                *f"{directory}/{server.program}".split(),
            ),
            serve=said,
        )
    return [" ".join(map(systemd_quote, line)) for line in said]


def replica_fingerprint(stage: Stage, model: Served, settings: EngineSettings) -> str:
    """
    Return the fingerprint (16 digits) of the start parameters that all ranks of a replica share.

    Ranks with different fingerprints do not form a group, so the ranks that a deploy has already
    changed wait for the other ranks. The fingerprint excludes parameters that differ between nodes.
    It also excludes parameters that follow from the list of nodes, which the ranks compare
    themselves.
    """
    server = engine(settings.engine)
    said = [line for _, line in server.arguments(replace(stage, node_rank=0), model, settings)]
    variables = server.replica_variables(model) | settings.environment | model.environment
    secret = sorted({*settings.environment_files, *model.environment_files})
    return _fingerprint(
        {
            "arguments": json.dumps([line for line in said if line[0] != "--host"]),
            "programs": _programs(settings.engine),
            **({"environment_files": json.dumps(secret)} if secret else {}),
            "environment": json.dumps(
                sorted(each for each in variables.items() if each[0] not in launch.OF_THE_NODE)
            ),
            "joined": json.dumps(
                [
                    model.distributed_executor_backend,
                    model.data_parallel_balancing,
                    [stage.group.cluster_port, stage.group.side_channel_port]
                    if stage.group
                    else [],
                ]
            ),
        }
    )[:16]


@cache
def _programs(name: str) -> str:
    """
    Return a fingerprint of gpufleet's own parts in every rank. A change of these restarts all
    ranks.
    """
    names = ("vllm.service.j2", "vllm-serve.sh")
    ours = {name: read_template(f"vllm/{name}") for name in names}
    guard = payload.source("serving/guard")
    launcher = engine(name).launcher
    if launcher.path != LAUNCHER:
        ours["launcher"] = launcher.content(TEMPLATES).decode()
    return _fingerprint({**ours, "guard": guard, "rank": payload.archive("rank/rank")})


def _is_in_a_home(directory: str) -> bool:
    # The directories that ProtectHome= hides (systemd.exec(5)).
    return directory.startswith(("/home/", "/root/", "/run/user/"))


# Drop-ins for packages' units


def drop_in(
    name: str,
    unit: str,
    *,
    started_with: Mapping[str, str | bytes],
    templates: Path = TEMPLATES,
    **variables: Any,
) -> UnitFile:
    """
    Return the drop-in for `unit`, which is a package's unit, from the template `name`.

    The template gets `unit`, `started` (the line that records the process' fingerprint) and
    `variables`. `started_with` is everything else that the process reads, such as versions and
    contents of files.
    """
    path = f"{UNIT_DIRECTORY}/{unit}.d/gpufleet.conf"
    return _render(name, unit, path, started_with, templates, **variables)


def whole_unit(
    name: str,
    unit: str,
    *,
    started_with: Mapping[str, str | bytes],
    templates: Path = TEMPLATES,
    **variables: Any,
) -> UnitFile:
    """
    Return the unit file from template `name`, which takes precedence over a package's unit.

    The parameters are those of `drop_in`.
    """
    return _render(name, unit, f"{UNIT_DIRECTORY}/{unit}", started_with, templates, **variables)


def _render(
    name: str,
    unit: str,
    path: str,
    started_with: Mapping[str, str | bytes],
    templates: Path,
    **variables: Any,
) -> UnitFile:
    if "" in started_with:
        raise ValueError("the empty name stands for the text itself")
    source = load_template(name, templates)
    # The text is rendered twice, because the fingerprint covers the text without the fingerprint.
    bare = source.render(unit=unit, started="", **variables)
    fingerprint = _fingerprint({**started_with, "": bare})
    content = source.render(unit=unit, started=started_line(fingerprint), **variables)
    return UnitFile(unit, path, content, fingerprint)


def _fingerprint(parts: Mapping[str, str | bytes]) -> str:
    """
    Return the SHA-256 over named parts. Each part is hashed separately, so that boundaries count.
    """
    digests = {
        name: hashlib.sha256(part.encode() if isinstance(part, str) else part).hexdigest()
        for name, part in parts.items()
    }
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
