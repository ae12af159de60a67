"""benchmarks/converge/table.py and ways.py: what is measured is held against goals, and written."""

from __future__ import annotations

import pytest

from benchmarks.converge.table import BEGIN, END, Run, held, markdown, replaced
from benchmarks.converge.ways import CHECK, changed


def runs(*clock: float) -> list[Run]:
    return [Run(seconds, 0.5, 0.25, 90) for seconds in clock]


def figures(nodes: int, ours: list[Run], floor: list[Run]) -> list[tuple[float, bool]]:
    found = held({nodes: {"ours": ours, "floor": floor}})
    return [(each.figure, each.kept) for each in found if each.what.endswith("`true`")]


@pytest.mark.parametrize(("nodes", "bound"), [(1, 2.5), (64, 4.0), (128, 4.0)])
def test_a_ratio_is_of_medians_and_misses_its_goal_above_the_bound(
    nodes: int, bound: float
) -> None:
    assert figures(nodes, runs(1, bound, 99), runs(0.1, 1, 1.1)) == [(bound, True)]
    assert figures(nodes, runs(bound * 1.01), runs(1)) == [(bound * 1.01, False)]
    missed = markdown({nodes: {"ours": runs(bound * 1.01), "floor": runs(1)}})
    assert missed.count("| missed |") == 1


def test_a_ratio_without_a_goal_is_shown_and_misses_none() -> None:
    assert figures(8, runs(50), runs(1)) == [(50.0, True)]


def test_against_pyinfras_operations_the_controllers_processor_counts() -> None:
    """At most a third, however long the clock says."""

    def kept(ours: float) -> list[tuple[str, bool]]:
        ways = {"ours": [Run(99, ours, 0, 90)], "stock": [Run(1, 3.0, 0, 90)]}
        return [(each.what, each.kept) for each in held({64: ways}) if "MiB" not in each.what]

    what = "`deploys/vllm.py` / pyinfra's own operations, controller's CPU"
    assert kept(1.0) == [(what, True)]
    assert kept(1.01) == [(what, False)]


def test_memory_has_a_goal_of_its_own() -> None:
    fat = [Run(1, 1, 1, 401)]
    assert [each.kept for each in held({8: {"ours": fat}})] == [False]
    assert [each.kept for each in held({8: {"ours": runs(1)}})] == [True]


def test_what_is_between_the_markers_is_replaced_and_nothing_else() -> None:
    page = f"# Before\n\n{BEGIN}\nold\n{END}\n\nafter {{}}\n"
    assert replaced(page, "new") == f"# Before\n\n{BEGIN}\n\nnew\n\n{END}\n\nafter {{}}\n"
    assert replaced(replaced(page, "x"), "new") == replaced(page, "new")


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="the page needs"):
        replaced(page, "new")


def test_a_change_that_a_way_reports_is_seen() -> None:
    head = "    Operation            Hosts   Success   Error   No Change   \n"
    same = f"{head}    file /a              2       -         -       2           \n"
    check = f"    {CHECK}  2       2         -       -           \n"
    did = "    a file               2       1         -       1           \n"
    bad = "    unit x               2       -         1       1           \n"
    total = "    Grand total          3       2         -       1           \n"
    assert changed("stock", same + check + total) == []
    assert changed("ours", same + did + bad + total) == ["a file", "unit x"]
    assert changed("ours", "nothing of a table") != []
    recap = "gpu-01   : ok=15   changed={}    unreachable=0    failed={}    skipped=4 \n"
    assert changed("ansible", recap.format(0, 0)) == []
    assert changed("ansible", recap.format(2, 0)) != []
    assert changed("ansible", recap.format(0, 1)) != []
    assert changed("ansible", "") != []
