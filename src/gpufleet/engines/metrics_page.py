"""Parse the /metrics page of a server of any engine, and look up values by measure. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gpufleet.engines.engine import Engine, Measure, engines

Samples: TypeAlias = tuple[tuple[Mapping[str, str], float], ...]
"""The samples of a metric, each with its labels and value."""


@dataclass(frozen=True)
class MetricsPage:
    """
    The parsed /metrics page of one server.

    Attributes:
        engine: the engine to which the metrics belong. None: the page has no metrics of an engine.
        samples: maps each sample name on the page to the samples with this name.
    """

    engine: Engine | None
    samples: Mapping[str, Samples]

    def measured(self, measure: Measure) -> Samples:
        """
        Return the samples of a measure.

        For a histogram, these are its buckets. Empty if there are none.
        """
        if self.engine is None:
            return ()
        names = self.engine.series(measure)
        return next((self.samples[name] for name in names if name in self.samples), ())

    def values(self, measure: Measure) -> tuple[float, ...]:
        """
        Return the values of a measure, one for each engine of the server and each set of labels.
        """
        return tuple(value for _, value in self.measured(measure))


def read_page(text: str) -> MetricsPage:
    """Parse a page of /metrics. Raises `ValueError` if the text is not such a page."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    for family in text_string_to_metric_families(text + "\n"):
        for sample in family.samples:
            samples[sample.name].append((sample.labels, sample.value))
    owner = next(
        (each for each in engines() if any(name.startswith(each.prefix) for name in samples)), None
    )
    return MetricsPage(owner, {name: tuple(rows) for name, rows in samples.items()})


def expected_name(measure: Measure, page: MetricsPage | None = None) -> str:
    """
    Return the metric name of a measure for the engine of `page`, or the names for all engines.
    """
    owners = (page.engine,) if page and page.engine else engines()
    return " or ".join(names[0] for each in owners if (names := each.metrics.get(measure)))
