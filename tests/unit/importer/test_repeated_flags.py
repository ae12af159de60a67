"""A flag that may be given several times, and what settings keep of it."""

from __future__ import annotations

from tests.unit.importer.test_import import imported, told


def test_a_flag_given_once_is_kept_without_a_word() -> None:
    found = imported("vllm serve /m --middleware a.b")

    assert found.settings["serving"]["model"]["flags"] == {"middleware": "a.b"}
    assert "--middleware" not in told(found)


def test_of_a_flag_given_twice_the_last_is_kept_and_a_person_decides() -> None:
    found = imported("vllm serve /m --middleware a.b --middleware c.d")

    assert found.settings["serving"]["model"]["flags"] == {"middleware": "c.d"}
    (note,) = [each for each in found.notes if "--middleware" in str(each)]
    assert "is given 2 times" in str(note)
    assert "only `c.d` is kept" in str(note)
    assert note.decide


def test_a_setting_of_ours_that_nobody_knows_the_value_of_is_no_flag_instead() -> None:
    found = imported("vllm serve /m --served-model-name $NAME --seed 7")

    (served,) = found.settings["serving"].values()
    assert served["flags"] == {"seed": 7}
    assert "set `served_name` yourself" in told(found)
