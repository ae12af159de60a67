"""
Refuse a replica that is too large for its nodes, and suggest a remedy. Pure.

Every suggested number and setting was tested with the model's sizing. Each suggestion alone is
sufficient for a replica on empty nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from gpufleet.formatting import count_of, join_names
from gpufleet.planning.candidates import CandidateSet, Sizer, evaluate_divisions
from gpufleet.planning.parallelism import Division
from gpufleet.settings.serving_settings import Served

if TYPE_CHECKING:
    from gpufleet.sizing.architectures.description import Description

_TRIED = 64
"""
Maximum number of values to try in each direction, so that a typing mistake does not cost minutes.
"""

_ALLOWED = {
    ("allow_pcie",): " if waiting for PCIe in every layer is acceptable",
    ("span_nodes",): "",
    ("allow_pcie", "span_nodes"): "",
}


class SizeRefusal:
    """The refusal of one model of which no replica fits on any kind of node that declares it."""

    def __init__(
        self,
        name: str,
        served: Served,
        description: Description | str | None,
        considered: Iterable[CandidateSet],
        *,
        sizer: Sizer,
    ) -> None:
        """
        Create the refusal.

        `considered` has the candidates of each kind of node. At least one kind has a chosen
        candidate.
        """
        self._name = name
        self._served = served
        self._description = description
        self._considered = tuple(considered)
        self._sizer = sizer
        self._nodes = join_names(name for each in self._considered for name in each.names)

    def __str__(self) -> str:
        """
        Return a sentence with the replica's need, the available GPUs, and the setting to change.
        """
        here, division = max(
            ((each, each.chosen.division) for each in self._considered if each.chosen),
            key=lambda found: (found[0].kind.gpus * found[0].nodes, str(found[0].kind)),
        )
        ways = [*self._numbers(division), *self._settings()]
        if division.nodes > 1:
            ways.append("add nodes")
        write = ", or ".join(ways) or "declare the model on nodes with more GPUs"
        return f"serving.{self._name}: {self._finding(here, division)}: {write}"

    def _finding(self, here: CandidateSet, division: Division) -> str:
        pcie = self._served.allow_pcie
        if division.nodes > 1:
            are = "is" if here.nodes == 1 else "are"
            return (
                f"{division} needs {division.nodes} nodes of the same kind with "
                f"{_gpus(division.share)} each, but only {join_names(here.names)} {are} of the "
                f"kind {here.kind}"
            )
        kinds = [each.kind for each in self._considered]
        largest = max(kind.gpus if pcie else max(kind.islands, default=0) for kind in kinds)
        if division.group > largest:
            what = (
                f"tensor_parallel {division.tensor_parallel}"
                if division.group == division.tensor_parallel
                else f"data_parallel {division.data_parallel} with experts on each GPU"
            )
            return (
                f"{what} needs {_gpus(division.group)} in one "
                f"{'node' if pcie else 'NVLink island'}, but the largest on {self._nodes} has "
                f"only {largest}"
            )
        most = max(kind.gpus for kind in kinds)
        groups = f" in groups of {division.group}" if division.group > 1 else ""
        return (
            f"{division} needs {_gpus(division.gpus)} on one node{groups}, but the largest of "
            f"{self._nodes} has only {most}"
        )

    def _numbers(self, division: Division) -> Iterator[str]:
        """
        Yield the nearest values that fit: smaller values, and larger values that divide evenly.
        """
        keys = ["data_parallel", "pipeline_parallel", "tensor_parallel"]
        if not division.expert_parallel:
            keys.sort(key=lambda key: -self._requested(key))
        for key in keys:
            asked = self._requested(key)
            most = max(each.kind.gpus * each.nodes for each in self._considered)
            most //= division.gpus // asked
            fewer = self._first(key, range(min(asked - 1, max(most, 1)), 0, -1))
            more = self._first(key, range(asked + 1, most + 1)) if asked > 1 else None
            if fewer:
                yield f"lower `{key}` to {fewer}"
            if more:
                yield f"raise `{key}` to {more}"
            if fewer or more:
                return
        # No single number is enough: lower one after another to 1, the last one only as far as
        # needed.
        lower: dict[str, int] = {}
        for key in keys:
            if last := self._first(key, range(self._requested(key) - 1, 0, -1), lower):
                written = (f"`{name}: {value}`" for name, value in {**lower, key: last}.items())
                yield f"set {' and '.join(written)}"
                return
            if self._requested(key) > 1:
                lower[key] = 1

    def _requested(self, key: str) -> int:
        return getattr(self._served, key) or 1

    def _first(
        self, key: str, numbers: Sequence[int], others: Mapping[str, int] | None = None
    ) -> int | None:
        tried = islice(numbers, _TRIED)
        also = others or {}
        return next((number for number in tried if self._is_enough({**also, key: number})), None)

    def _settings(self) -> Iterator[str]:
        """
        Yield the settings with which the replica fits: single settings, or both if one is not
        enough.
        """
        found = False
        for keys, acceptable in _ALLOWED.items():
            if any(getattr(self._served, key) for key in keys) or (found and len(keys) > 1):
                continue
            if self._is_enough(dict.fromkeys(keys, True)):
                written = " and ".join(f"`{key}: true`" for key in keys)
                found = True
                yield f"set {written}{acceptable}"

    def _is_enough(self, changes: Mapping[str, int | bool]) -> bool:
        changed = self._served.model_copy(update=changes)
        for each in self._considered:
            found = evaluate_divisions(
                self._name, changed, self._description, each.kind, each.nodes, sizer=self._sizer
            )
            if found.chosen and found.chosen.replicas:
                return True
        return False


def _gpus(count: int) -> str:
    return count_of(count, "GPU")
