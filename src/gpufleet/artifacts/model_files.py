"""Compute the path of a model's files on a node, and the download script.  Pure.

Files are staged before a unit is touched, so that a restart costs only the load time, and no
service needs the hub or its token to start.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from shlex import quote

from gpufleet import node_paths
from gpufleet.remote import sandbox
from gpufleet.settings.adapter_settings import Adapter
from gpufleet.settings.serving_settings import EngineSettings, Served

TOKEN = f"{node_paths.VLLM_CREDENTIALS}/hf-token"
MODELS = node_paths.MODELS
ADAPTER_COPIES = f"{MODELS}/adapters"
"""
Directory of pinned copies of adapters from paths on the node. Each is in a folder named by its
SHA-256.
"""
DOWNLOADING = ".gpufleet-download-"
"""Prefix of download folders, equal to the constant in on_node/transfer/place_model.py."""
# The default endpoint of the Hub's client.
HUB = "https://huggingface.co"
# 700 GB at 1 Gbit/s: the largest open checkpoints on a slow line.
DOWNLOAD_SECONDS = 6 * 3600
# Additional seconds after the download: renames, and writing the last data to disk.
PLACE_SECONDS = 3600


@dataclass(frozen=True)
class Checkpoint:
    """The required files of one model on a node."""

    repository: str
    revision: str
    directory: str

    @property
    def download(self) -> str:
        """Return the service user's download directory (on_node/transfer/place_model.py)."""
        parent, _, name = self.directory.rpartition("/")
        return f"{parent}/{DOWNLOADING}{name}"

    @property
    def mark(self) -> str:
        """Return the file that marks a complete model."""
        return f"{self.directory}/.complete"


@dataclass(frozen=True)
class AdapterCopy:
    """An adapter at a path of the node, and the path of its pinned copy."""

    source: str
    sha256: str
    directory: str

    @property
    def mark(self) -> str:
        """Return the file that marks a complete copy."""
        return f"{self.directory}/.complete"


def model_directory(model: Served) -> str:
    """
    Return the directory of the model's files on the node.

    A Hub model's is `/var/lib/vllm/models/<org>--<name>/<revision>`; a path is returned unchanged.
    """
    return model.model if model.is_path else _hub_directory(model.model, str(model.revision))


def adapter_directory(adapter: Adapter) -> str:
    """Return an adapter's path for servers. The path of a pinned copy contains its hash."""
    if not adapter.is_path:
        return _hub_directory(adapter.source, str(adapter.revision))
    return f"{ADAPTER_COPIES}/{adapter.sha256}" if adapter.sha256 else adapter.source


def checkpoint(model: Served) -> Checkpoint | None:
    """Return the model's download, or None for a model at a path of the node."""
    if model.is_path or model.revision is None:
        return None
    return Checkpoint(model.model, model.revision, model_directory(model))


def checkpoints(model: Served) -> tuple[Checkpoint, ...]:
    """Return an entry's downloads: its model and adapters, except those at a path of the node."""
    return tuple(
        Checkpoint(repository, revision, _hub_directory(repository, revision))
        for repository, revision in model.hub_sources
    )


def adapter_copies(model: Served) -> tuple[AdapterCopy, ...]:
    """Return the adapters of an entry that are copied from a path of the node."""
    return tuple(
        AdapterCopy(each.source, each.sha256, adapter_directory(each))
        for each in model.adapters.values()
        if each.sha256
    )


def _hub_directory(repository: str, revision: str) -> str:
    return f"{MODELS}/{repository.replace('/', '--')}/{revision}"


def listing_url(wanted: Checkpoint, servers: EngineSettings) -> str:
    """Return the URL of the Hub's list of a model's files with their sizes."""
    hub = (servers.hf_endpoint or HUB).rstrip("/")
    return f"{hub}/api/models/{wanted.repository}/tree/{wanted.revision}?recursive=true"


def download_script(wanted: Checkpoint, servers: EngineSettings, release_directory: str) -> str:
    """
    Return the shell script that downloads the files. A second run resumes the download.

    `on_node/transfer/place_model.py` creates the folder before the script runs, and moves the files
    to their final path afterwards. The download runs as the service user in a transient unit that
    can write only to that folder. The unit passes the token as a credential, so no argument list
    and no readable environment has it.

    The unit outlives an interrupted deploy, and its Hub client locks the files, so the next
    download would wait for it. Therefore the unit is named after the folder, and the next download
    stops it first.
    """
    token = servers.hf_token_file is not None
    folder = wanted.download
    properties = [
        f"User={servers.user}",
        "UMask=0022",
        f"RuntimeMaxSec={DOWNLOAD_SECONDS}",
        *sandbox.PROPERTIES,
        f"ReadWritePaths={folder}",
        *([f"LoadCredential=hf-token:{TOKEN}"] if token else []),
    ]
    environment = {
        "HOME": f"{folder}/home",
        "HF_HOME": f"{folder}/home/huggingface",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **({"HF_ENDPOINT": servers.hf_endpoint} if servers.hf_endpoint else {}),
    }
    use_token = "export HF_TOKEN_PATH=$CREDENTIALS_DIRECTORY/hf-token; " if token else ""
    download = (
        f"exec {release_directory}/bin/hf download {quote(wanted.repository)} "
        f"--revision {quote(wanted.revision)} --local-dir {quote(f'{folder}/files')}"
    )
    options = " ".join(
        [
            *(f"-p {quote(each)}" for each in properties),
            *(f"-E {quote(f'{name}={value}')}" for name, value in environment.items()),
        ]
    )
    unit = f"gpufleet-download-{hashlib.sha256(folder.encode()).hexdigest()[:10]}.service"
    return f"""set -eu
test -e {quote(wanted.mark)} && exit 0
systemctl stop {unit} 2>/dev/null || :
for each in 1 2 3 4 5 6 7 8 9 10; do
    case $(systemctl show -p LoadState {unit}) in *=not-found) break ;; *) sleep 0.5 ;; esac
done
{" ".join(sandbox.RUN)} --unit={unit} {options} -- /bin/sh -c {quote(use_token + download)}
"""
