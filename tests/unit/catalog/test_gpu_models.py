"""GPUs are known by name with what CUDA reports of them, or refused."""

import re

import pytest

from gpufleet.catalog.gpu_models import LOWEST_SHARE, card, cards, cuda_total_gib, names
from gpufleet.errors import FleetError
from tests.support.rows import each_row


@each_row("name", names())
def test_cuda_reports_less_than_the_nominal_size(name):
    """No entry is a number from a box: CUDA's total is no multiple of 8 GiB."""
    found = card(name)

    assert found.memory_gib % 8
    assert found.source
    assert found.products


@each_row("name", names())
def test_a_product_is_the_same_card_under_nvmls_name(name):
    """The planner knows a GPU by what NVML calls it, an operator by its short name."""
    found = card(name)
    for product in found.products:
        assert cuda_total_gib(product, 1 << 50) == found.memory_gib
        if found.shares_name:
            with pytest.raises(FleetError, match=f"with different memory sizes: give {name}"):
                card(product)
        else:
            assert card(product) == found


@each_row(
    ("written", "name"),
    [
        ("A100-80GB", "A100"),
        ("H100-SXM", "H100"),
        ("4090", "RTX-4090"),
        ("5070 Ti", "RTX-5070-Ti"),
        ("GH200", "GH200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("H20-3e", "H20-141GB"),
        ("NVIDIA H20", "H20"),
    ],
)
def test_an_alias_is_the_card_that_operators_mean(written, name):
    assert card(written).name == name


def test_no_two_cards_have_a_name_in_common():
    """Else which one an operator gets would depend on the order of a file."""
    written = [
        re.sub("[^a-z0-9]", "", each.lower())
        for one in cards()
        for each in {one.name, *one.aliases, *one.products}
    ]
    assert len(set(written)) == len(written)


def test_a_card_of_a_known_name_with_less_memory_counts_with_its_own():
    """The 5060 Ti is sold with 16 and with 8 GB: NVML's 8,151 MiB, less what the driver keeps."""
    product = "NVIDIA GeForce RTX 5060 Ti"
    assert cuda_total_gib(product, 16311 << 20) == card("RTX-5060-Ti-16GB").memory_gib
    assert cuda_total_gib(product, 8151 << 20) == pytest.approx(8151 / 1024 * LOWEST_SHARE)


@pytest.mark.parametrize(
    "written", ["h100", "H100", "NVIDIA H100 80GB HBM3", "nvidia_h100-80gb-hbm3"]
)
def test_case_and_separators_do_not_count(written):
    assert card(written).name == "H100"


def test_a_name_that_is_not_there_is_refused_with_near_ones():
    """An H100 with another memory is not taken for the H100 that is known."""
    with pytest.raises(FleetError, match=r"H100-NVL.*--gpu-memory-gib") as refused:
        card("H100-NVL2")

    assert "is unknown" in str(refused.value)


def test_an_unknown_product_counts_with_less_than_nvml_says():
    """A plan never counts on memory that the driver keeps for itself."""
    assert cuda_total_gib("NVIDIA Something", 48 * 2**30) == 48 * LOWEST_SHARE
    assert cuda_total_gib("NVIDIA L40S", 48 * 2**30) == card("L40S").memory_gib


def test_a_partition_of_a_known_product_is_not_taken_for_the_whole():
    """NVML may report less than the product has: that, less what the driver keeps, is the limit."""
    assert cuda_total_gib("NVIDIA H100 80GB HBM3", 40 * 2**30) == 40 * LOWEST_SHARE


def test_a_name_that_nothing_is_near_to_is_refused_with_all_that_are_known():
    with pytest.raises(FleetError, match="similar names: H100-NVL") as near:
        card("H100-NVL2")
    with pytest.raises(FleetError) as far:
        card("zzzzzzzz")

    assert "known GPUs: " not in str(near.value)
    assert f"known GPUs: {', '.join(names())}" in str(far.value)


@each_row("name", ["8xH100", "H100x8", "h100:8", "8 * h100", "H100 x 8"])
def test_a_number_before_or_behind_a_name_is_told_apart(name):
    with pytest.raises(FleetError, match=r"write --gpu H100 --gpus 8$"):
        card(name)
