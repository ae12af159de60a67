"""Report on the files of models and on free disk space. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet import node_paths
from gpufleet.formatting import count_of, join_names
from gpufleet.preflight.line import Line, Status, Verdict, by_node, reason, unknown
from gpufleet.remote.query import Answer

RELEASE = "release"
"""
The name of the next release among the items that need disk space. Models have their own names.
"""


@dataclass(frozen=True)
class WantedModel:
    """The files that a model must have on a node."""

    model: str
    """The name of the model in `serving`."""
    directory: str
    from_hub: bool
    """
    Whether gpufleet downloads the model from the Hub. If not, the model is at a path on the node,
    where an operator puts the files.
    """
    files: Mapping[str, tuple[str, str]] | None
    """{file: (algorithm, digest)}. None if no lock has hashes of the files."""


def model_lines(
    looks: Mapping[str, Answer], wanted: Mapping[str, tuple[WantedModel, ...]], inventory: str
) -> tuple[Line, ...]:
    """
    Return lines on whether the models are complete on the nodes' disks. Nodes with the same verdict
    share a line.
    """
    lines: list[Line] = []
    models = sorted({each.model for models in wanted.values() for each in models})
    for model in models:
        found = {
            node: _model(looks.get(node, "the node was not queried"), each, inventory)
            for node, models in wanted.items()
            for each in models
            if each.model == model
        }
        lines += [
            Line(line.check, f"{model} on {line.subject}", line.verdict)
            for line in by_node("model-files", found)
        ]
    if lines:
        return tuple(lines)
    return (
        unknown(
            "model-files", "no model is known to be planned or to run", f"gpufleet plan {inventory}"
        ),
    )


def is_whole(look: Answer, wanted: WantedModel) -> bool:
    """Return whether it is known that the model is complete on the node."""
    return _model(look, wanted, "").status in {Status.OK, Status.WARN}


def _model(look: Answer, wanted: WantedModel, inventory: str) -> Verdict:
    deploy = f"gpufleet deploy vllm {inventory}"
    if isinstance(look, str):
        return Verdict(Status.UNKNOWN, "could not be checked", look, deploy)
    said: Mapping[str, Any] = look["models"].get(
        wanted.directory, {"missing": "the node was not queried"}
    )
    where = wanted.directory
    put = deploy if wanted.from_hub else f"copy the model's files to {where}"
    if said.get("missing") == "absent" or isinstance(said.get("missing"), str):
        if said["missing"] == "absent":
            return Verdict(Status.FAIL, "is missing", f"{where} does not exist", put)
        return Verdict(Status.UNKNOWN, "could not be checked", f"{where}: {reason(said)}", put)
    # A deploy skips a directory that is marked as complete.
    again = f"remove {where}/.complete on the node, then {deploy}" if wanted.from_hub else put
    for names, what in ((said["missing"], "has files missing"), (said["wrong"], "has other files")):
        if names:
            return Verdict(Status.FAIL, what, f"{where}: {join_names(names)}", again)
    if wanted.from_hub and not said["complete"]:
        return Verdict(Status.FAIL, "is not complete", f"{where}/.complete is not there", deploy)
    for names, what in (
        (said["changed"], "was changed after the download was complete"),
        (said["extra"], "has files that are not in the lock"),
    ):
        if names:
            return Verdict(Status.FAIL, what, f"{where}: {join_names(names)}", again)
    size = f"{said['bytes'] / (1 << 30):.1f} GiB"
    if wanted.files is not None:
        many = count_of(len(wanted.files), "file")
        proof = (
            f"all {many} of the lock, {size}; {said['hashed']} hashed now; the larger files were "
            f"hashed when they were placed and are unchanged since then"
        )
        return Verdict(Status.OK, "is whole", proof)
    if wanted.from_hub:
        proof = f"{size}, complete, but no lock contains the hashes of its files"
        remedy = f"gpufleet lock {inventory} --models"
        return Verdict(Status.WARN, "is complete but has no lock", proof, remedy)
    return Verdict(
        Status.OK, "is there", f"{size} at {where}, with all files that the model's index lists"
    )


# -- disk


def disk_lines(
    answers: Mapping[str, Answer],
    looks: Mapping[str, Answer],
    models: Mapping[str, tuple[WantedModel, ...]],
    releases: Mapping[str, str],
    inventory: str,
) -> tuple[Line, ...]:
    """
    Return lines on whether each disk has space for one more release and for one more revision of
    each model from the Hub.

    It is assumed that they have the size of those that exist now. `answers` are the probes of the
    nodes. `releases` maps each node to the directory of its declared release.
    """
    found = {
        node: _disk(
            answers.get(node, "the node was not queried"),
            looks.get(node, "the node was not queried"),
            tuple(each for each in models.get(node, ()) if each.from_hub),
            release,
            inventory,
        )
        for node, release in releases.items()
    }
    if found:
        return by_node("disk", found)
    return (unknown("disk", "no node has `vllm`", f"gpufleet validate {inventory}"),)


def _disk(
    probe: Answer, look: Answer, models: tuple[WantedModel, ...], release: str, inventory: str
) -> Verdict:
    see = f"gpufleet deploy vllm {inventory}"
    for answer in (probe, look):
        if isinstance(answer, str):
            return Verdict(Status.UNKNOWN, "could not be checked", answer, see)
    assert not isinstance(probe, str)  # noqa: S101  # the loop above has returned for a str
    assert not isinstance(look, str)  # noqa: S101
    disks: Mapping[str, Any] = probe["system"]["disks"]
    needs: dict[str, list[tuple[str, float]]] = defaultdict(list)
    size = look["folders"].get(release, {"missing": "the node was not queried"})
    if isinstance(size, Mapping):
        said = "the release is not installed" if size["missing"] == "absent" else reason(size)
        proof = f"the size of the next release is unknown: {said}"
        return Verdict(Status.UNKNOWN, "could not be checked", proof, see)
    needs[node_paths.RELEASES].append((RELEASE, size / (1 << 30)))
    for each in models:
        there = look["models"].get(each.directory, {})
        if "bytes" not in there:
            proof = f"the size of {each.model} is unknown: {reason(there)}"
            return Verdict(Status.UNKNOWN, "could not be checked", proof, see)
        needs[node_paths.MODELS].append((each.model, there["bytes"] / (1 << 30)))
    mounts: dict[str, tuple[float, list[tuple[str, float]]]] = {}
    for path, parts in needs.items():
        disk = disks.get(path)
        if not isinstance(disk, Mapping) or "missing" in disk:
            why = (
                reason(disk)
                if isinstance(disk, Mapping)
                else "the probe's answer does not contain it"
            )
            return Verdict(Status.UNKNOWN, "could not be checked", f"space at {path}: {why}", see)
        free, before = mounts.get(disk["mount"], (disk["free_mib"] / 1024, []))
        mounts[disk["mount"]] = free, [*before, *parts]
    shown: list[str] = []
    short = False
    bare = ""
    for mount, (free, parts) in sorted(mounts.items()):
        total = sum(gib for _, gib in parts)
        what = ", ".join(f"{name} {gib:.1f}" for name, gib in parts)
        shown.append(f"{mount}: {free:.1f} GiB are free, {total:.1f} GiB are needed ({what})")
        short = short or free < total
        # The release comes first, because a security update is a release.
        if parts[0][0] == RELEASE and free < parts[0][1]:
            bare = mount
    if bare:
        remedy = f"free or add disk space at {bare}, or lower `vllm.keep_releases`"
        what = "has no room for another release, so no update can be installed"
        return Verdict(Status.FAIL, what, "; ".join(shown), remedy)
    if short:
        remedy = "free or add disk space on this file system, or lower `vllm.keep_releases`"
        return Verdict(Status.WARN, "has no room for the next upgrade", "; ".join(shown), remedy)
    return Verdict(Status.OK, "has room for the next upgrade", "; ".join(shown))
