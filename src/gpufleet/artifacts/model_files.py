"""Compute the path of a model's files on a node, and the download script. Pure.

Files are downloaded before a unit is changed. So a restart takes only the time for loading, and a
service needs neither the Hub nor its token to start.
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
Directory of pinned copies of adapters that are at a path of the node. The name of each copy's
folder is the adapter's SHA-256.
"""
DOWNLOADING = ".gpufleet-download-"
"""
Prefix of folders for downloads. The constant in on_node/transfer/place_model.py must be equal.
"""
# The default endpoint of the Hub's client.
HUB = "https://huggingface.co"
# Enough for 700 GB at 1 Gbit/s. These are the largest open checkpoints over a slow connection.
DOWNLOAD_SECONDS = 6 * 3600
# Additional seconds after the download, for renaming and for writing the last data to disk.
PLACE_SECONDS = 3600


@dataclass(frozen=True)
class Checkpoint:
    """The files of one model that a node must have."""

    repository: str
    revision: str
    directory: str

    @property
    def download(self) -> str:
        """Return the directory to which the service user downloads (transfer/place_model.py)."""
        parent, _, name = self.directory.rpartition("/")
        return f"{parent}/{DOWNLOADING}{name}"

    @property
    def mark(self) -> str:
        """Return the file that marks the model as complete."""
        return f"{self.directory}/.complete"


@dataclass(frozen=True)
class AdapterCopy:
    """An adapter at a path of the node, and the path of its pinned copy."""

    source: str
    sha256: str
    directory: str

    @property
    def mark(self) -> str:
        """Return the file that marks the copy as complete."""
        return f"{self.directory}/.complete"


def model_directory(model: Served) -> str:
    """
    Return the directory of the model's files on the node.

    For a model of the Hub, it is `/var/lib/vllm/models/<org>--<name>/<revision>`. If the setting is
    already a path, it is returned unchanged.
    """
    return model.model if model.is_path else _hub_directory(model.model, str(model.revision))


def adapter_directory(adapter: Adapter) -> str:
    """
    Return the path from which servers load an adapter. The path of a pinned copy has its hash.
    """
    if not adapter.is_path:
        return _hub_directory(adapter.source, str(adapter.revision))
    return f"{ADAPTER_COPIES}/{adapter.sha256}" if adapter.sha256 else adapter.source


def checkpoint(model: Served) -> Checkpoint | None:
    """Return the model's download, or None for a model at a path of the node."""
    if model.is_path or model.revision is None:
        return None
    return Checkpoint(model.model, model.revision, model_directory(model))


def checkpoints(model: Served) -> tuple[Checkpoint, ...]:
    """
    Return what must be downloaded for an entry: its model and its adapters.

    Those that are at a path of the node are left out.
    """
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
    """Return the URL at which the Hub lists a model's files with their sizes."""
    hub = (servers.hf_endpoint or HUB).rstrip("/")
    return f"{hub}/api/models/{wanted.repository}/tree/{wanted.revision}?recursive=true"


def download_script(wanted: Checkpoint, servers: EngineSettings, release_directory: str) -> str:
    """
    Return the shell script that downloads the files. A second run resumes the download.

    `on_node/transfer/place_model.py` creates the folder before the script runs, and moves the files
    to their final path afterwards. The download runs as the service user in a transient unit that
    can write only to that folder. The unit gets the token as a credential, so the token is in no
    argument list and in no environment that others can read.

    If a deploy is interrupted, its unit continues and its Hub client keeps the files locked. The
    next download would wait for this client. So the unit has the name of the folder, and the next
    download stops it first.
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
