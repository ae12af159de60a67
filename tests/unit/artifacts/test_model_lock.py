"""The lock of models, and what is said of models that it does not name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufleet.artifacts.model_files import Checkpoint
from gpufleet.artifacts.model_lock import judge_models, locked_files, read_lock, write_lock
from gpufleet.errors import FleetError
from gpufleet.settings.node_settings import NodeSettings

REVISION, OTHER = "0" * 40, "1" * 40
FILES = {"config.json": ("git", "a" * 40), "sub/model.safetensors": ("sha256", "b" * 64)}


def node(lock: Path, **served: Any) -> NodeSettings:
    return NodeSettings.model_validate(
        {
            "vllm": {
                "version": "0.32.0",
                "lock": "locks/none.txt",
                "listen": "127.0.0.1",
                "models_lock": str(lock),
            },
            "serving": {"m": {"model": "org/m", "revision": REVISION, **served}},
        }
    )


def test_what_is_written_is_read_again_and_found_by_revision(tmp_path: Path) -> None:
    path = tmp_path / "models.lock.json"
    assert read_lock(path) == {}
    write_lock(path, {("org/m", REVISION): FILES})

    assert read_lock(path) == {("org/m", REVISION): FILES}
    vllm = node(path).vllm
    assert vllm
    assert locked_files(Checkpoint("org/m", REVISION, "/x"), vllm) == FILES
    assert locked_files(Checkpoint("org/m", OTHER, "/x"), vllm) is None
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 2, "models": {}}',
        '{"schema": 1, "models": {"org/m": {"r": {"a": ["md5", "00"]}}}}',
        '{"schema": 1, "models": {"org/m": {"r": {"a": ["sha256", "00"]}}}}',
    ],
)
def test_a_lock_that_is_none_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    """To take it for empty would have nodes take any files."""
    path = tmp_path / "models.lock.json"
    path.write_text(text)

    with pytest.raises(FleetError, match=r"models\.lock\.json cannot be read.*--models"):
        judge_models({"a": node(path)})


def test_a_model_without_a_lock_is_remarked_and_refused_where_its_code_runs(tmp_path: Path) -> None:
    path = tmp_path / "models.lock.json"
    code = {"flags": {"trust-remote-code": True}}

    (remark,) = judge_models({"a": node(path), "b": node(path)})
    assert "org/m" in remark
    assert "gpufleet lock INVENTORY --models" in remark
    assert judge_models({"a": node(path, model="/srv/m", revision=None, **code)}) == ()
    with pytest.raises(FleetError, match=r"serving\.m: `trust-remote-code`.*allow_unlocked_code"):
        judge_models({"a": node(path, **code)})
    assert judge_models({"a": node(path, flags={"trust-remote-code": False})}) == (remark,)
    assert judge_models({"a": node(path, allow_unlocked_code=True, **code)}) == (remark,)

    write_lock(path, {("org/m", OTHER): FILES})
    assert judge_models({"a": node(path)}) == (remark,), "another revision is another model"
    write_lock(path, {("org/m", REVISION): FILES})
    assert judge_models({"a": node(path, **code)}) == ()
