"""Every division of a node's GPUs is sized as it would be alone."""

from __future__ import annotations

from dataclasses import replace

from gpufleet.catalog.gpu_models import card
from gpufleet.sizing.divisions import divisions
from gpufleet.sizing.fit import size
from gpufleet.sizing.options import Options
from tests.support.models import described

H100 = Options(gpu_memory_gib=card("H100").memory_gib, vllm=(0, 32, 0))


def test_each_division_of_eight_gpus_is_there_once_and_sized_by_itself() -> None:
    model = described("meta-llama--Meta-Llama-3.1-8B")
    found = [*divisions(model, H100, 8)]
    sizes = [(each.tensor, each.pipeline, each.data) for each in found]
    assert sizes == [
        (8, 1, 1),
        (4, 1, 2),
        (4, 2, 1),
        (2, 1, 4),
        (2, 2, 2),
        (2, 4, 1),
        (1, 1, 8),
        (1, 2, 4),
        (1, 4, 2),
        (1, 8, 1),
    ]
    for each in found:
        divided = replace(
            H100,
            tensor_parallel=each.tensor,
            pipeline_parallel=each.pipeline,
            data_parallel=each.data,
        )
        assert each.sizing == size(model, divided)
        assert each.at_once == each.sizing.max_concurrency * each.data


def test_of_six_gpus_only_what_leaves_none_over_is_a_division() -> None:
    found = [*divisions(described("meta-llama--Meta-Llama-3.1-8B"), H100, 6)]
    assert [(each.tensor, each.pipeline, each.data) for each in found] == [
        (2, 1, 3),
        (1, 1, 6),
        (1, 2, 3),
    ]


def test_no_pipeline_has_more_stages_than_the_model_has_layers() -> None:
    model = described("meta-llama--Meta-Llama-3.1-8B")
    short = replace(model.architecture, layers=model.architecture.layers[:2])
    found = divisions(replace(model, architecture=short), H100, 8)
    assert max(each.pipeline for each in found) == 2
