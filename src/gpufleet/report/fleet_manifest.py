"""Write the JSON manifest from which a fleet can be rebuilt, and compare two manifests. Pure.

A manifest has names, versions and hashes. It has no secrets and no hashes of secrets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from pydantic import AwareDatetime, Field

from gpufleet.formatting import count_of, node_ranges
from gpufleet.report.fleet_document import Checkout, Digests, Document, Form, Texts

SCHEMA: Final = 1
"""Version of the manifest, and of the output of `--compare --json`."""
ABSENT = "not there"
NOT_KNOWN = "not known"


class NodeManifest(Form):
    """The software that is installed on a node."""

    groups: Texts
    system: str
    gpus: Texts
    """The GPUs' names, in the order of their indexes."""
    versions: dict[str, str | None]
    """{part: version}. null: the version is not known."""
    packages: dict[str, str]
    releases: Texts
    """Complete releases of vLLM on the node."""


class ModelManifest(Form):
    """An entry of `serving`, as some nodes declare it."""

    name: str
    source: str
    revision: str
    replicas: str
    nodes: Texts
    release: str
    """The release of vLLM."""
    files: Digests
    adapters: Texts = ()
    """LoRA adapters. A manifest of an older gpufleet has none."""


class Manifest(Form):
    """Everything that is needed to rebuild a fleet."""

    schema_: Literal[1] = Field(default=SCHEMA, alias="schema")
    inventory: str
    when: AwareDatetime
    gpufleet: str
    """The version of gpufleet."""
    checkout: Checkout
    files: dict[str, str]
    """SHA-256 of the inventory, its variables and locks, by path below the project."""
    nodes: dict[str, NodeManifest | None]
    """{node: its software, or null if the node did not answer}."""
    models: tuple[ModelManifest, ...]
    unknown: Texts


def manifest_of(document: Document) -> Manifest:
    """Return the manifest of a fleet."""
    return Manifest(
        inventory=document.inventory,
        when=document.when,
        gpufleet=document.version,
        checkout=document.checkout,
        files=document.files,
        nodes={
            each.name: None
            if each.silent
            else NodeManifest(
                groups=each.groups,
                system=each.system,
                gpus=tuple(gpu.name for gpu in each.gpus),
                versions={one.part: one.found for one in each.versions},
                packages=each.packages,
                releases=each.releases,
            )
            for each in document.nodes
        },
        models=tuple(
            ModelManifest(
                name=each.name,
                source=each.source,
                revision=each.revision,
                replicas=each.declared,
                nodes=each.nodes,
                release=each.release,
                files=each.files,
                adapters=each.adapters,
            )
            for each in document.models
        ),
        unknown=document.unknown,
    )


# -- comparison


@dataclass(frozen=True)
class Difference:
    """One difference between two manifests."""

    about: str
    """
    The subject: `gpufleet`, `settings`, `file PATH`, `nodes`, nodes such as `gpu-[01-03]`, or
    `model NAME`.
    """
    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.about}: {self.what}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Comparison:
    """The differences between two manifests."""

    before: Manifest
    after: Manifest
    differences: tuple[Difference, ...]

    @property
    def status(self) -> int:
        """Return the exit status: 0 if there are no differences, else 1."""
        return 1 if self.differences else 0

    def lines(self) -> Iterator[str]:
        """Yield the lines that `--compare` prints."""
        when = [f"{each.inventory} at {each.when:%Y-%m-%d %H:%M UTC}" for each in self._both]
        yield f"{when[0]} -> {when[1]}"
        yield from map(str, self.differences)
        yield count_of(len(self.differences), "difference") if self.differences else "no difference"

    @property
    def _both(self) -> tuple[Manifest, Manifest]:
        return self.before, self.after

    def as_json(self) -> dict[str, Any]:
        """
        Return the comparison as plain values for `json.dumps`:

            {"schema": 1, "before": {"inventory": ..., "when": ...}, "after": {...},
             "differences": [{"about": "gpu-[01-03]", "what": "driver", "before": "580.95.05",
                              "after": "580.105.08"}]}
        """
        sides = [
            {"inventory": each.inventory, "when": each.when.isoformat()} for each in self._both
        ]
        return {
            "schema": SCHEMA,
            "before": sides[0],
            "after": sides[1],
            "differences": [asdict(each) for each in self.differences],
        }


def compare(before: Manifest, after: Manifest) -> Comparison:
    """Return the differences between two manifests. Their times are not compared."""
    found = [
        *_values("gpufleet", "version", before.gpufleet, after.gpufleet),
        *_values("settings", "commit", *(_commit(each.checkout) for each in (before, after))),
        *_files(before.files, after.files),
        *_nodes(before.nodes, after.nodes),
        *_models(before, after),
    ]
    return Comparison(before, after, tuple(found))


def _values(about: str, what: str, before: str, after: str) -> Iterator[Difference]:
    if before != after:
        yield Difference(about, what, before, after)


def _commit(checkout: Checkout) -> str:
    changed = " with uncommitted changes" if checkout.changed else ""
    return f"{checkout.commit or 'not in git'}{changed}"


def _files(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted({*before, *after}):
        sides = [
            f"sha256 {each[name][:12]}" if name in each else ABSENT for each in (before, after)
        ]
        if before.get(name) != after.get(name):
            yield Difference(f"file {name}", "content", *sides)


def _nodes(
    before: Mapping[str, NodeManifest | None], after: Mapping[str, NodeManifest | None]
) -> Iterator[Difference]:
    """Yield the differences between nodes. Equal differences of several nodes share one line."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted({*before, *after}):
        sides = [_flat(each[name]) if name in each else {} for each in (before, after)]
        if name not in before or name not in after:
            keys = [("node", "there" if sides[0] else ABSENT, "there" if sides[1] else ABSENT)]
        elif not (before[name] and after[name]):
            keys = [("node", _answered(before[name]), _answered(after[name]))]
        else:
            parts = sorted({*sides[0], *sides[1]})
            keys = [(p, sides[0].get(p, ABSENT), sides[1].get(p, ABSENT)) for p in parts]
        for key in keys:
            if key[1] != key[2]:
                alike.setdefault(key, []).append(name)
    for (part, *values), names in alike.items():
        yield Difference(node_ranges(names), part, *values)


def _answered(node: NodeManifest | None) -> str:
    return "answers" if node else "does not answer, so its state is unknown"


def _flat(node: NodeManifest | None) -> dict[str, str]:
    """
    Return {name of a fact: value} for a node.

    If the node did not answer, the result has only this fact.
    """
    if node is None:
        return {"node": "silent"}
    return {
        "groups": ", ".join(node.groups) or "none",
        "system": node.system,
        "GPUs": ", ".join(node.gpus) or "none",
        **{
            name: NOT_KNOWN if found is None else found or ABSENT
            for name, found in node.versions.items()
        },
        **{f"package {name}": found for name, found in node.packages.items()},
        "releases of vLLM": ", ".join(node.releases) or "none",
    }


def _models(before: Manifest, after: Manifest) -> Iterator[Difference]:
    sides = [_by_name(each) for each in (before, after)]
    for name in sorted({*sides[0], *sides[1]}):
        old, new = (each.get(name, ()) for each in sides)
        if len(old) != 1 or len(new) != 1:
            if old != new:
                yield Difference(f"model {name}", "declared", _declared(old), _declared(new))
            continue
        yield from _entry(f"model {name}", old[0], new[0])


def _by_name(manifest: Manifest) -> dict[str, tuple[ModelManifest, ...]]:
    found: dict[str, tuple[ModelManifest, ...]] = {}
    for each in manifest.models:
        found[each.name] = (*found.get(each.name, ()), each)
    return found


def _declared(entries: tuple[ModelManifest, ...]) -> str:
    """Return a summary of all declarations of a model. They may differ between nodes."""
    ways = (
        f"{each.source} {each.revision or 'without a revision'}, vLLM {each.release or NOT_KNOWN}, "
        f"replicas {each.replicas}, {count_of(len(each.files), 'locked file')}, on "
        f"{node_ranges(each.nodes)}"
        for each in entries
    )
    return "; ".join(ways) or ABSENT


def _entry(about: str, before: ModelManifest, after: ModelManifest) -> Iterator[Difference]:
    for what in ("source", "revision", "release", "replicas"):
        sides = [str(getattr(each, what)) or "none" for each in (before, after)]
        yield from _values(about, "vLLM" if what == "release" else what, *sides)
    yield from _values(about, "nodes", node_ranges(before.nodes), node_ranges(after.nodes))
    for name in sorted({*before.files, *after.files}):
        digests = [
            " ".join((each.files[name][0], each.files[name][1][:12]))
            if name in each.files
            else "not locked"
            for each in (before, after)
        ]
        if before.files.get(name) != after.files.get(name):
            yield Difference(about, f"file {name}", *digests)
