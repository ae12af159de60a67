"""Describe a measured replica from the facts of its nodes. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpufleet.artifacts.release import engine_version
from gpufleet.flags.normalize import human_readable
from gpufleet.load_test.fingerprint import Subject
from gpufleet.node.topology import Node
from gpufleet.planning.stage import Running
from gpufleet.settings.engine_flags import DEFAULT, LENGTH_FLAGS
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.architectures.description import Described
from gpufleet.versions import numbers

OVERRIDES = "--hf-overrides"

FOLDER = "measurements"
"""The name of the folder with measurements. In a project, it is beside `inventories/`."""


def measurements_folder(inventory_file: str) -> Path:
    """
    Return the directory of an inventory's measurements.

    >>> str(measurements_folder("/fleet/inventories/prod.py"))
    '/fleet/measurements'
    >>> str(measurements_folder("/fleet/prod.py"))
    '/fleet/measurements'
    """
    folder = Path(inventory_file).absolute().parent
    return (folder.parent if folder.name == "inventories" else folder) / FOLDER


def longest_request(stage: Running, model: Described) -> int | None:
    """
    Return the maximum tokens of a prompt and its answer together, or None if it is unknown.

    If the flag for the maximum length is not set, the maximum is the model's own. If another flag
    changes the model's config, the maximum is then unknown.
    """
    given = {name: value for name, _, value in (e.strip().partition(" ") for e in stage.arguments)}
    engine, version = engine_version(stage.release)
    if (length := f"--{LENGTH_FLAGS.get(engine, '')}") in given:
        return human_readable(given[length])
    if engine != DEFAULT:
        return None
    if isinstance(model, str) or OVERRIDES in given or not re.match(r"\d+\.\d+", version):
        return None
    return model.architecture.default_length(numbers(version))


def subject_of(
    stages: Sequence[Running], model: Served, nodes: Mapping[str, Node], replicas: Sequence[Running]
) -> Subject:
    """
    Return the description of a measured replica.

    `stages` are all ranks of this replica. `replicas` are the ranks of all replicas that share the
    load.
    """
    ranks = sorted(stages, key=lambda each: each.rank)
    first = ranks[0]
    gpus: Counter[str] = Counter()
    for each in ranks:
        here = nodes.get(each.node)
        names = {gpu.uuid: gpu.name for gpu in here.gpus} if here else {}
        gpus.update(names.get(uuid, "unknown GPU") for uuid in each.gpu_uuids)
    drivers = {nodes[each.node].driver for each in ranks if each.node in nodes}
    return Subject(
        model.model,
        model.revision or "",
        first.release,
        tuple(line.strip() for line in first.arguments),
        dict(gpus),
        drivers.pop() if len(drivers) == 1 else None,
        tuple(sorted({each.node for each in replicas})),
    )
