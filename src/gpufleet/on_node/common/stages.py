"""RUNS ON THE NODE: read this node's stage units and model descriptions.

Unit files are read from disk even if the units do not run, because the next plan keeps their
placement. Of a model, only the descriptions are read, not the weights.
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
# The section of gpufleet in vllm.service.j2. systemd ignores sections whose names begin with "X-"
# (systemd.unit(5)).
SECTION = "X-Gpufleet"
RELEASE = re.compile(r"/releases/([^/\s]+)/bin/")
SIDE_CHANNEL = re.compile(r"^Environment=VLLM_NIXL_SIDE_CHANNEL_PORT=(\d+)$", re.MULTILINE)
# Size limits of the files that are read. The largest units are gpufleet's, of 8 KB. An index has
# one line for each tensor; for the largest public models it has about 20 MB.
UNIT_BYTES = 1 << 20
DESCRIPTION_BYTES = 64 << 20


def stages() -> list[dict[str, Any]]:
    """Return the stage of each of gpufleet's vLLM units, ordered by unit name."""
    if not os.path.isdir(linux_facts.ROOT + UNITS):
        return []
    return [read(stage, name) for name in linux_facts.directory_names(UNITS) if is_stage_unit(name)]


def stage(unit: str) -> dict[str, Any]:
    """Return one unit's stage, or `foreign` if gpufleet does not manage the unit."""
    with open(linux_facts.ROOT + UNITS + "/" + unit, encoding="utf-8", errors="replace") as file:
        text = file.read(UNIT_BYTES)
    # Only gpufleet's section is parsed. systemd's sections repeat keys and use a quoting that
    # parsers of INI files do not accept.
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
    Return the release and the arguments of a unit. A unit has one argument on each line.

    In vllm.service.j2, the command is the launcher `.../releases/<id>/bin/vllm serve` and its
    arguments. For a rank of a multi-node replica, the command is vllm-rank instead, and one of the
    arguments has the release.
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
    Return the data of the model at `path` from its files.

      config, hf_quant_config  contents of these files
      bytes           size of all tensors; missing if the model has no safetensors files
      modules         modules of sentence-transformers, for an embedder
      adapter_config  configuration of a LoRA adapter
      lost            tensor files that cannot be loaded
      marked          whether a deploy has marked the model as complete
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
    """Return "file" or "folder" for a path. Raises `OSError` if the path cannot be read."""
    return "folder" if stat.S_ISDIR(os.stat(linux_facts.ROOT + path).st_mode) else "file"


def parse_json_file(path: str) -> Any:
    """Return a JSON file's content."""
    with open(path, encoding="utf-8") as file:
        return json.loads(file.read(DESCRIPTION_BYTES))


def stored_bytes(folder: str) -> int:
    """Return the size of a checkpoint's tensors in bytes, from its index or its files."""
    try:
        return int(
            parse_json_file(folder + "/model.safetensors.index.json")["metadata"]["total_size"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return tensors(folder + "/model.safetensors")


def tensors(path: str) -> int:
    """Return the size of one file's tensors in bytes. They are everything after the header."""
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    size = os.path.getsize(path) - 8 - header
    if size < 0:
        raise ValueError("%s is truncated, or it is not a safetensors file" % path)
    return size
