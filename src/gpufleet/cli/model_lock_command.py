"""`gpufleet lock INVENTORY --models`: write the hashes of models' files that the Hub reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufleet.errors import FleetError

if TYPE_CHECKING:
    from gpufleet.artifacts.model_lock import Files
    from gpufleet.bundle.models import Model
    from gpufleet.inventory.loader import Fleet

CHANGED = 1
"""The exit status of `--dry` if the command would change a file."""


def lock_models(inventory_file: str, *, dry: bool) -> int:
    """
    Write the model locks that the settings name, and return the exit status.

    If a revision is already locked, its hashes do not change, and the Hub is not queried for it.
    """
    from gpufleet.artifacts import model_lock
    from gpufleet.inventory.loader import read

    fleet = read(inventory_file)
    wanted: dict[Path, dict[tuple[str, str], Model]] = {}
    for path, model in _models(fleet):
        wanted.setdefault(path, {})[model.repository, model.revision] = model
    if not wanted:
        raise FleetError(
            f"{inventory_file}: no node serves a model from the Hub, so there is nothing to lock"
        )
    status = 0
    for path, models in wanted.items():
        there = model_lock.read_lock(path)
        found = {key: there.get(key) or _files(model) for key, model in models.items()}
        if found == there:
            click.echo(f"{path} already contains these models", err=True)
        elif dry:
            click.echo(model_lock.lock_text(found), nl=False)
            click.echo(f"would be written to {path}", err=True)
            status = CHANGED
        else:
            model_lock.write_lock(path, found)
            count = sum(map(len, found.values()))
            click.echo(f"{path} is written: {len(found)} models, {count} files", err=True)
    return status


def _models(fleet: Fleet) -> Iterator[tuple[Path, Model]]:
    """
    Yield each model with the path of its lock file.

    The hashes come from the address in the settings (by default the Hub) and not from a mirror.
    """
    from gpufleet.bundle.models import Model
    from gpufleet.settings.node_settings import NodeSettings
    from gpufleet.settings.parse import parse_written

    for node in fleet.gpu_nodes.values():
        servers = node.settings.servers
        if servers is None:
            continue
        ours = {key: each for key, each in node.values.items() if key in NodeSettings.model_fields}
        written = parse_written(ours).servers
        for served in node.settings.serving.values():
            for repository, revision in served.hub_sources:
                endpoint = written.hf_endpoint if written else None
                model = Model(repository, revision, endpoint, servers.hf_token_file)
                yield fleet.root / servers.models_lock, model


def _files(model: Model) -> Files:
    from gpufleet.artifacts import operator_files
    from gpufleet.bundle import models

    token = operator_files.read(model.token_file).decode().strip() if model.token_file else None
    click.echo(f"{model.repository} at {model.revision}", err=True)
    return {
        remote.path.removeprefix(f"{model.files}/"): (
            remote.digests[0].algorithm,
            remote.digests[0].hexdigest,
        )
        for remote in models.find(model, token)
    }
