"""RUNS ON THE NODE: read this node's stage units and model descriptions.

Units are read from disk, running or not, because the next plan keeps their placement. Only a
model's descriptions are read, not its weights.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import stat
from typing import Any, Iterator

from gpufleet.on_node.common import linux_facts, model_folder
from gpufleet.on_node.common.answers import CannotRead, read
from gpufleet.on_node.common.stage_units import is_stage_unit

UNITS = "/etc/systemd/system"
# systemd ignores sections whose names begin so (systemd.unit(5)); vllm.service.j2 has it.
SECTION = "X-Gpufleet"
RELEASE = re.compile(r"/releases/([^/\s]+)/bin/")
SIDE_CHANNEL = re.compile(r"^Environment=VLLM_NIXL_SIDE_CHANNEL_PORT=(\d+)$", re.MULTILINE)
# The largest are ours, of 8 KB; an index has a line for each tensor, of the largest public models
# some 20 MB.
UNIT_BYTES = 1 << 20
DESCRIPTION_BYTES = 64 << 20


def stages() -> list[dict[str, Any]]:
    """Return the stage of each of gpufleet's vLLM units, ordered by unit name."""
    if not os.path.isdir(linux_facts.ROOT + UNITS):
        return []
    return [read(stage, name) for name in linux_facts.directory_names(UNITS) if is_stage_unit(name)]


def stage(unit: str) -> dict[str, Any]:
    """Return one unit's stage, or `foreign` if gpufleet does not manage it."""
    with open(linux_facts.ROOT + UNITS + "/" + unit, encoding="utf-8", errors="replace") as file:
        text = file.read(UNIT_BYTES)
    # Only our section: systemd's own repeat keys, and no parser of INI files likes its quoting.
    _, found, section = text.partition("\n[%s]\n" % SECTION)
    if not found:
        return {"unit": unit, "foreign": True}
    parser = configparser.RawConfigParser()
    parser.read_string("[stage]\n" + "\n".join(until_next(section)))
    values = dict(parser["stage"])
    return {
        "unit": unit,
        "model": values["model"],
        "replica": int(values["replica"]),
        "rank": int(values["rank"]),
        "port": int(values["port"]),
        "gpus": values["gpus"].split(),
        "kind": values.get("kind", "generate"),
        "side_channel": int(next(iter(SIDE_CHANNEL.findall(text)), 0)),
        **started_release(text),
    }


def started_release(text: str) -> dict[str, Any]:
    """
    Return the release and the arguments of a unit; the unit has one argument on each line.

    vllm.service.j2: the launcher, `.../releases/<id>/bin/vllm serve`, one argument on each line. A
    multi-node rank has vllm-rank there, and the release in an argument.
    """
    _, _, rest = text.partition("\nExecStart=")
    lines = []
    for line in rest.splitlines():
        lines.append(line.strip().rstrip("\\").strip())
        if not line.endswith("\\"):
            break
    releases = (RELEASE.search(line) for line in lines[1:])
    release = next((found.group(1) for found in releases if found), "")
    return {"release": release, "arguments": lines[2:]}


def until_next(text: str) -> Iterator[str]:
    """Yield the lines up to the next section of a unit."""
    for line in text.splitlines():
        if line.startswith("["):
            return
        yield line


def model(path: str) -> dict[str, Any]:
    """
    Return the data of a model's files at `path`: `config`, `hf_quant_config`, `bytes`.

    `bytes` are those of its tensors; missing where there are no safetensors. `modules` are
    sentence-transformers' modules of an embedder. `adapter_config` is of a LoRA adapter. `lost` are
    files of tensors that cannot be loaded; `marked`: a deploy has marked it as complete.
    """
    folder = linux_facts.ROOT + path
    if named_file(path) != "folder":
        raise CannotRead("absent")
    return {
        "config": read(parse_json_file, folder + "/config.json"),
        "hf_quant_config": read(parse_json_file, folder + "/hf_quant_config.json"),
        "adapter_config": read(parse_json_file, folder + "/adapter_config.json"),
        "bytes": read(stored_bytes, folder),
        "modules": read(parse_json_file, folder + "/modules.json"),
        "marked": os.path.exists(os.path.join(folder, model_folder.MARK)),
        "lost": read(model_folder.lost_weights, folder),
    }


def named_file(path: str) -> str:
    """Return "file" or "folder" for a path. Raises `OSError` if it cannot be read."""
    return "folder" if stat.S_ISDIR(os.stat(linux_facts.ROOT + path).st_mode) else "file"


def parse_json_file(path: str) -> Any:
    """Return a JSON file's content."""
    with open(path, encoding="utf-8") as file:
        return json.loads(file.read(DESCRIPTION_BYTES))


def stored_bytes(folder: str) -> int:
    """Return the bytes of a checkpoint's tensors, from its index or its files."""
    try:
        return int(
            parse_json_file(folder + "/model.safetensors.index.json")["metadata"]["total_size"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return tensors(folder + "/model.safetensors")


def tensors(path: str) -> int:
    """Return the bytes of one file's tensors, which are everything after its header."""
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    size = os.path.getsize(path) - 8 - header
    if size < 0:
        raise ValueError("%s is cut off, or is not a safetensors file" % path)
    return size
