"""Define the paths of a model's files so that the Hub's own client finds them in a bundle.

The client first requests the documents api/models/OWNER/NAME/revision/COMMIT and .../tree/COMMIT,
which list the files of the model at one revision. It then requests OWNER/NAME/resolve/COMMIT/FILE
for each file, and expects the commit in a header of the answer (`serve.py`). Each downloaded file
is verified with the hash that the Hub lists. For large files it is SHA-256, and for small files it
is git's hash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpufleet.bundle.download import Digest, Folder, Remote, without_password
from gpufleet.errors import FleetError
from gpufleet.settings.mirror_rewrite import HUB

_DIGEST = {64: "sha256", 40: "git"}


@dataclass(frozen=True)
class Model:
    """One model and its Hub. If `endpoint` is None, huggingface_hub uses its default Hub."""

    repository: str
    revision: str
    endpoint: str | None
    token_file: str | None

    @property
    def document(self) -> str:
        """The path in the bundle of the document that describes this revision."""
        return f"{HUB}/api/models/{self.repository}/revision/{self.revision}"

    @property
    def tree(self) -> str:
        """The path in the bundle of the document that lists the model's files with their sizes."""
        return f"{HUB}/api/models/{self.repository}/tree/{self.revision}"

    @property
    def files(self) -> str:
        """The folder in the bundle with the model's files."""
        return f"{HUB}/{self.repository}/resolve/{self.revision}"


def find(model: Model, token: str | None) -> tuple[Remote, ...]:
    """
    Return the downloads of the model's files.

    Raises FleetError if the Hub cannot be queried, or if it has no hash for a file.
    """
    return tuple(_remote(model, name, token) for name in _names(model, token))


def describe(folder: Folder, model: Model, remotes: Sequence[Remote]) -> tuple[str, str]:
    """Write the documents that list the model's files, and return their paths."""
    names = {remote.path.removeprefix(f"{model.files}/"): remote for remote in remotes}
    about = {
        "_id": model.revision[:24],
        "id": model.repository,
        "modelId": model.repository,
        "sha": model.revision,
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": [{"rfilename": name} for name in sorted(names)],
    }
    tree = [
        {
            "type": "file",
            "path": name,
            "size": (folder.root / remote.path).stat().st_size,
            "oid": remote.digests[0].hexdigest[:40],
        }
        for name, remote in sorted(names.items())
    ]
    folder.write(model.document, json.dumps(about, indent=1).encode())
    folder.write(model.tree, json.dumps(tree, indent=1).encode())
    return model.document, model.tree


def _names(model: Model, token: str | None) -> tuple[str, ...]:
    from httpx2 import HTTPError
    from huggingface_hub import HfApi

    try:
        # False: do not use the token of a user who is logged in here.
        info = HfApi(endpoint=model.endpoint, token=token or False).model_info(
            model.repository, revision=model.revision, timeout=60
        )
    except (
        HTTPError,
        OSError,
        ValueError,
    ) as error:  # for an invalid name, or an answer that is not JSON
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FleetError(
            f"{model.repository} at {model.revision}: the Hub does not list the files of this "
            f"model: {said}. For a gated model, set `vllm.hf_token_file`"
        ) from None
    if info.sha != model.revision:
        raise FleetError(
            f"{model.repository}: the Hub returned revision {info.sha}, but {model.revision} was "
            "requested"
        )
    names = tuple(each.rfilename for each in info.siblings or ())
    if odd := [name for name in names if name.startswith("/") or ".." in name.split("/")]:
        raise FleetError(f"{model.repository}: lists a file outside its folder: {odd[0]!r}")
    return names


def _remote(model: Model, name: str, token: str | None) -> Remote:
    from httpx2 import HTTPError
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(model.repository, name, revision=model.revision, endpoint=model.endpoint)
    try:
        found = get_hf_file_metadata(url, token=token or False, timeout=60)
    except (HTTPError, OSError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FleetError(
            f"{without_password(url)}: the Hub returned no information about this file: {said}"
        ) from None
    etag = found.etag or ""
    if not re.fullmatch(r"[0-9a-f]+", etag) or len(etag) not in _DIGEST:
        raise FleetError(
            f"{without_password(url)}: the ETag {etag!r} is not a hash, so the content cannot be "
            "verified"
        )
    headers: Mapping[str, Any] = {"Authorization": f"Bearer {token}"} if token else {}
    return Remote(
        url, f"{model.files}/{name}", (Digest(_DIGEST[len(etag)], etag),), found.size, headers
    )
