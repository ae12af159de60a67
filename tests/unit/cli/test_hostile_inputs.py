"""No file and no word makes a command crash, hang, or speak in a library's words."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import ROOT
from tests.support.hostile import ANSWERED, PAGE, TEXTS, WRONG, Row, as_bytes, changed, fault
from tests.support.measured import note
from tests.support.sound_node import sound_node

UPGRADE = "20261122T134708Z-ab12"
INVENTORY = b"""\
from gpufleet import inventory
globals().update(inventory.load(__file__, groups={"gpu_h100": ["gpu-01"]}))
"""
SETTINGS: dict[str, Any] = {
    "vllm": {
        "version": "0.32.0",
        "lock": str(ROOT / "locks/vllm-0.32.0.txt"),
        "listen": "127.0.0.1",
        "environment": {"NCCL_DEBUG": "WARN"},
    },
    "gpus": {"count": 8, "reserved": [7]},
    "checks": {"accept": [], "degraded": False},
    "firewall": {"clients": ["10.0.0.0/8"]},
    "serving": {
        "q": {
            "model": "/srv/q",
            "context": 8192,
            "flags": {"max-num-seqs": 8},
            "presets": ["chat"],
        }
    },
}
PROBES = as_bytes({"gpu-01": sound_node("/srv/q")})
CONFIG = json.loads((ROOT / "tests/data/models/Qwen--Qwen3-32B.json").read_text())["config"]
SIZE = ("size", "{}/model", "--gpu", "H100", "--offline")

# Each command that reads a file: its command line, the file in question, and what is beside it.
READERS: dict[str, tuple[tuple[str, ...], str, dict[str, bytes]]] = {
    "plan --nodes": (
        ("plan", "--nodes", "{}/n.json", "--vars", "{}/v.yml"),
        "n.json",
        {"v.yml": as_bytes(SETTINGS)},
    ),
    "plan --vars": (
        ("plan", "--nodes", "{}/n.json", "--vars", "{}/v.yml"),
        "v.yml",
        {"n.json": PROBES},
    ),
    "check --from": (("check", "--from", "{}/n.json"), "n.json", {}),
    "check --vars": (
        ("check", "--from", "{}/n.json", "--vars", "{}/v.yml"),
        "v.yml",
        {"n.json": PROBES},
    ),
    "topology": (("topology", "{}/n.json"), "n.json", {}),
    "topology of a text": (("topology", "{}/topo.txt"), "topo.txt", {}),
    "inventory": (("inventory", "{}/inventories/prod.py"), "inventories/prod.py", {}),
    "group_vars": (
        ("inventory", "{}/inventories/prod.py"),
        "group_vars/gpu_h100.yml",
        {"inventories/prod.py": INVENTORY},
    ),
    "host_vars": (
        ("inventory", "{}/inventories/prod.py"),
        "host_vars/gpu-01.yml",
        {"inventories/prod.py": INVENTORY},
    ),
    "a lock of nodes": (
        ("inventory", "{}/inventories/prod.py"),
        "group_vars/gpu_h100/gpu.lock.yml",
        {"inventories/prod.py": INVENTORY},
    ),
    "import of YAML": (("import", "{}/it.yml"), "it.yml", {}),
    "import of a script": (("import", "{}/it.sh"), "it.sh", {}),
    "import of any file": (("import", "{}/it"), "it", {}),
    "flags check by a file": (("flags", "check", "--vllm", "{}/s.json", "--", "m"), "s.json", {}),
    "flags diff": (
        ("flags", "diff", "0.31.0", "0.32.0", "--settings", "{}/v.yml"),
        "v.yml",
        {},
    ),
    "size of a config": (SIZE, "model/config.json", {}),
    "size beside an index": (
        SIZE,
        "model/model.safetensors.index.json",
        {"model/config.json": as_bytes(CONFIG)},
    ),
    "size of weights": (
        SIZE,
        "model/model.safetensors",
        {"model/config.json": as_bytes(CONFIG)},
    ),
    "size beside ModelOpt's file": (
        SIZE,
        "model/hf_quant_config.json",
        {"model/config.json": as_bytes(CONFIG)},
    ),
    "a journal": (
        ("upgrade", "{}/inventories/prod.py", "--report", UPGRADE, "--journal", "{}/journals"),
        f"journals/{UPGRADE}.jsonl",
        {"inventories/prod.py": INVENTORY},
    ),
    "bundle --nodes": (
        ("bundle", "{}/inventories/prod.py", "--nodes", "{}/n.json", "-o", "{}/out"),
        "n.json",
        {"inventories/prod.py": INVENTORY, "group_vars/gpu_h100.yml": as_bytes(SETTINGS)},
    ),
    "doctor": (("doctor", "{}/a.log"), "a.log", {}),
    "packages audit": (("packages", "audit", "{}/lock.txt"), "lock.txt", {}),
}

WORDS = (
    "",
    " ",
    "\0",
    "-",
    "--",
    "../../etc/passwd",
    "/dev/null",
    "a" * 5000,
    "\x1b[2J",
    "größe",
    "%s%n",
    "{x}",
    "$(id)",
    "9" * 400,
    "1e400",
    "NaN",
    "0.32",
    "v0.32.0",
)
WORDY: dict[str, tuple[str, ...]] = {
    "explain": ("flags", "explain", "WORD"),
    "check's release": ("flags", "check", "--vllm", "WORD", "--", "m"),
    "check's words": ("flags", "check", "--vllm", "0.32.0", "--", "m", "WORD", "--max-num-seqs"),
    "check's variable": ("flags", "check", "--env", "WORD", "--", "m"),
    "diff": ("flags", "diff", "WORD", "0.32.0"),
    "preset": ("presets", "WORD"),
    "GPU": ("size", "org/m", "--offline", "--gpu", "WORD"),
    "model": ("size", "WORD", "--offline", "--gpu", "H100"),
    "length": ("size", "{}/model", "--gpu", "H100", "--max-model-len", "WORD"),
    "overrides": ("size", "{}/model", "--gpu", "H100", "--hf-overrides", "WORD"),
    "inventory": ("check", "WORD"),
    "report": ("upgrade", "{}/inventories/prod.py", "--report", "WORD"),
    "subcommand": ("WORD",),
    "log": ("doctor", "WORD"),
    "import's name": ("import", "{}/it.sh", "--name", "WORD"),
}


def file_rows() -> Iterator[Row]:
    for (reader, (command, file, beside)), (name, text) in itertools.product(
        READERS.items(), TEXTS.items()
    ):
        yield Row(f"{reader}: {name}", command, {**beside, file: text})


def missing_rows() -> Iterator[Row]:
    for reader, (command, _, beside) in READERS.items():
        yield Row(f"{reader}: no such file", command, beside)


def document_rows() -> Iterator[Row]:
    """Documents of the right form in which one value is of another kind."""
    node = sound_node("/srv/q")
    for number, (place, put) in enumerate(changed(node, 2)):
        wrong = WRONG[number % len(WRONG)]
        files = {"n.json": as_bytes({"gpu-01": put(wrong)}), "v.yml": as_bytes(SETTINGS)}
        command = READERS["plan --nodes"][0] if number % 2 else ("check", "--from", "{}/n.json")
        yield Row(f"probe's {place} is {wrong!r}", command, files)
    for number, (place, put) in enumerate(changed(SETTINGS, 4)):
        for wrong in (WRONG[number % 7], WRONG[(number + 3) % 7]):
            files = {"n.json": PROBES, "v.yml": as_bytes(put(wrong))}
            yield Row(f"setting {place} is {wrong!r}", READERS["plan --vars"][0], files)
    for number, (place, put) in enumerate(changed(CONFIG, 1)):
        for wrong in (WRONG[number % 7], -1, 10**30):
            files = {"model/config.json": as_bytes(put(wrong))}
            yield Row(f"config's {place} is {wrong!r}", SIZE, files)


def weights_rows() -> Iterator[Row]:
    """Headers of safetensors that lie: length, JSON, types, offsets, names."""
    tensor = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}
    headers: dict[str, Any] = {
        "no type": {"a": {**tensor, "dtype": "BF17"}},
        "a shape below 0": {"a": {**tensor, "shape": [-1, 2]}},
        "a shape of texts": {"a": {**tensor, "shape": ["x"]}},
        "offsets backwards": {"a": {**tensor, "data_offsets": [8, 0]}},
        "offsets beyond the file": {"a": {**tensor, "data_offsets": [0, 2**60]}},
        "a tensor that is none": {"a": 3},
        "no offsets": {"a": {"dtype": "BF16", "shape": []}},
        "a list": [1],
    }
    for name, header in headers.items():
        text = as_bytes(header)
        yield weights(name, struct.pack("<Q", len(text)) + text + bytes(8))
    for name, length in (("0", 0), ("2**63", 2**63), ("100 MB", 100_000_000)):
        yield weights(f"a header of {name} bytes", struct.pack("<Q", length) + b"{}")


def weights(name: str, content: bytes) -> Row:
    files = {"model/config.json": as_bytes(CONFIG), "model/model.safetensors": content}
    return Row(f"weights: {name}", SIZE, files)


def word_rows() -> Iterator[Row]:
    beside = {
        "model/config.json": as_bytes(CONFIG),
        "inventories/prod.py": INVENTORY,
        "it.sh": b"vllm serve org/m\n",
    }
    for (name, command), word in itertools.product(WORDY.items(), WORDS):
        words = tuple(word if each == "WORD" else each for each in command)
        yield Row(f"{name}: {word[:20]!r}", words, beside)


ROWS = {
    "files": file_rows,
    "missing files": missing_rows,
    "documents": document_rows,
    "weights": weights_rows,
    "words": word_rows,
}

WHAT = {
    "files": "files that commands read: broken, binary, bombs, of another kind",
    "missing files": "files that are not there",
    "documents": "probes, settings and model configs with one value of another kind",
    "weights": "headers of safetensors that lie",
    "words": "words on command lines: empty, huge, escape codes, paths",
}


SAMPLE = 6
"""Each sixth row in every run, all of them in a long part."""


@pytest.mark.parametrize("kind", ROWS)
def test_a_sample_of_hostile_inputs_ends_in_sentences(kind: str, tmp_path: Path) -> None:
    assert faults(kind, SAMPLE, tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ROWS)
def test_every_hostile_input_ends_in_a_sentence(kind: str, tmp_path: Path) -> None:
    assert faults(kind, 1, tmp_path) == []
    count = len(list(ROWS[kind]()))
    note(PAGE, WHAT[kind], "`unit/cli/test_hostile_inputs.py`", str(count), ANSWERED)


def test_there_are_more_than_630_hostile_inputs() -> None:
    assert sum(len(list(rows())) for rows in ROWS.values()) > 630


def faults(kind: str, step: int, folder: Path) -> list[str]:
    """
    Return what is wrong with how commands take inputs of a kind, a line each.

    From a process of their own: commands that connect have gevent replace Python's threads.
    """
    hub = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.cli.test_hostile_inputs", kind, str(step)],
        cwd=folder,
        env={**os.environ, **hub},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *found, last = done.stdout.splitlines()
    assert int(last) > 0
    return found


def main(kind: str, step: int) -> None:
    """Print what is wrong, a line each, and last how many inputs there were."""
    rows = list(ROWS[kind]())[::step]
    for number, row in enumerate(rows):
        if found := fault(row, Path(str(number)).resolve()):
            print(found.replace("\n", " "), flush=True)
    print(len(rows))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
