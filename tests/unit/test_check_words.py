"""`make lint` keeps indirect words out of code, templates and pages."""

from __future__ import annotations

import doctest
import json
from collections import Counter
from pathlib import Path

import pytest

from tools import check_words


def test_examples_of_docstrings_hold() -> None:
    assert doctest.testmod(check_words).failed == 0


def test_no_folder_uses_a_word_more_often_than_its_record_allows() -> None:
    allowed = json.loads((check_words.ROOT / check_words.RECORD).read_text("utf-8"))
    assert list(check_words.excess(check_words.counts(), allowed)) == []


def test_a_word_is_found_in_comments_strings_and_over_a_line_end() -> None:
    text = '# Whoever reads\nraise Error("nobody")\n"""A list of\n    ours"""\n# none of\n# yours'
    assert check_words.uses(text) == {"whoever": 1, "of ours": 1, "of yours": 1}
    assert check_words.uses('"nobody asks"') == {"nobody": 1}


def test_the_unprivileged_user_is_no_word_of_prose() -> None:
    assert not check_words.uses("LOGNAME=nobody; chown `nobody`; setpriv --reuid 'nobody'")


def test_a_folder_without_a_record_uses_no_word() -> None:
    found = list(check_words.excess({"lab": Counter(nobody=1)}, {}))
    assert len(found) == 1
    assert found[0].startswith("lab: 1 x `nobody`, 0 allowed")


def test_a_word_added_to_a_room_fails_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    room, record = tmp_path / "src/gpufleet/checks", tmp_path / "tools/words.json"
    room.mkdir(parents=True)
    record.parent.mkdir()
    (room / "gpus.py").write_text("# Somebody set it.\n")
    record.write_text("{}")
    assert check_words.main([], tmp_path) == 1
    assert "src/gpufleet/checks: 1 x `somebody`" in capsys.readouterr().err
    assert check_words.main(["--record"], tmp_path) == 0
    assert check_words.main([], tmp_path) == 0
