"""The first model fits where it is said to, by the same sizing as a plan's."""

from __future__ import annotations

import json

import pytest

from gpufleet.errors import FleetError
from gpufleet.setup.first_model import CONTEXT, ROWS, choose, hub_revision, parse_model
from tests.support import warm_command
from tests.support.checkout import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_model_fits_the_least_gpu_of_its_row(row, tmp_path) -> None:
    kept = json.loads((ROOT / f"tests/data/models/{row.model.replace('/', '--')}.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(kept["config"]))

    limit = ("--max-model-len", str(CONTEXT), "--json")
    # Of a data centre's cards: 8.9.
    card = ("--gpu", "L4", "--gpu-memory-gib", row.memory_gib)
    done = warm_command.run(["size", file, *card, *limit])

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_largest_model_that_a_gpu_holds_is_chosen_and_none_where_memory_is_not_known() -> None:
    assert [row.memory_gib for row in ROWS] == sorted(
        (row.memory_gib for row in ROWS), reverse=True
    )
    assert choose([79.0]) is ROWS[0]
    assert choose([79.0, ROWS[0].memory_gib - 1]) is ROWS[1]
    assert choose([1.0]) is None
    assert choose([79.0, None]) is None
    assert choose([None]) is None
    assert choose([]) is None


def test_a_model_is_given_with_its_commit_or_as_a_path_of_the_nodes() -> None:
    assert parse_model(f"lab/tiny@{COMMIT}").revision == COMMIT
    assert parse_model("Qwen/Qwen3-8B").revision is None
    assert parse_model("/srv/models/qwen3").local
    assert parse_model("Qwen/Qwen3-8B").name == "qwen3-8b"
    with pytest.raises(FleetError, match="--model qwen"):
        parse_model("qwen")
    with pytest.raises(FleetError, match="40 digits"):
        parse_model("Qwen/Qwen3-8B@main")


def test_a_hub_that_cannot_be_reached_says_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    assert hub_revision("Qwen/Qwen3-8B") is None
