"""benchmarks/converge/table.py and ways.py: what is measured is held against goals, and written."""

from __future__ import annotations

import pytest

from benchmarks.converge.table import BEGIN, END, GOALS, Run, markdown, ratios, replaced
from benchmarks.converge.ways import CHECK, changed


def runs(*clock: float) -> list[Run]:
    return [Run(seconds, 0.5, 0.25, 90) for seconds in clock]


def test_a_ratio_is_of_medians_and_misses_its_goal_above_the_bound() -> None:
    goal = next(each for each in GOALS if (each.above, each.below) == ("ours", "floor"))
    kept = {8: {"ours": runs(1, goal.bound, 99), "floor": runs(0.1, 1, 1.1)}}
    missed = {8: {"ours": runs(goal.bound * 1.01), "floor": runs(1)}}
    assert [(each[2], each[3]) for each in ratios(kept)] == [(goal.bound, True)]
    assert [each[3] for each in ratios(missed)] == [False]
    assert "| missed |" in markdown(missed)


def test_few_nodes_have_no_goal_for_they_measure_how_python_starts() -> None:
    assert [each[3] for each in ratios({1: {"ours": runs(50), "floor": runs(1)}})] == [True]


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
