"""The parts of a removal name every place where gpufleet writes on a node."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from gpufleet import node_paths
from gpufleet.operations.remove_parts import Part
from gpufleet.settings.node_settings import NodeSettings
from roles.absent import parts

PLACES = {
    name: value
    for name, value in vars(node_paths).items()
    if name.isupper() and isinstance(value, str) and value.startswith("/")
}


def wanted(**absent: object) -> list[tuple[str, Part]]:
    return parts(NodeSettings.model_validate({"absent": absent}))


def test_every_place_on_nodes_is_in_a_part() -> None:
    patterns = [pattern for _, part in wanted() for pattern in part.paths]

    assert len(PLACES) > 30
    left = [
        name
        for name, value in PLACES.items()
        if not any(
            fnmatchcase(str(above), pattern)
            for pattern in patterns
            for above in (PurePosixPath(value), *PurePosixPath(value).parents)
        )
    ]
    assert left == []


def test_models_and_drivers_stay_unless_told() -> None:
    assert "drivers" not in dict(wanted())
    assert dict(wanted())["serving"].keep == (node_paths.MODELS,)
    told = dict(wanted(models=True, drivers=True))
    assert "nvidia-*" in told["drivers"].packages
    assert told["serving"].keep == ()
    assert not any("nvidia-*" in part.packages for _, part in wanted())


def test_named_parts_go_alone() -> None:
    assert {name for name, _ in wanted(parts=["gateway"])} == {"gateway"}


def test_packages_go_only_with_files_that_gpufleet_alone_writes() -> None:
    """A HAProxy or a Prometheus of others stays."""
    bare = [name for name, part in wanted(drivers=True) if part.packages and not part.marks]
    assert bare == []
