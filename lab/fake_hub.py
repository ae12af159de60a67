"""Simulate the Hugging Face Hub for `hf download` and vLLM, with the lab's own models.

Contract: `answer()` turns one GET or HEAD request below the hub's prefix into an `Answer`, and
reads only files under `models`. Every request needs the lab's token. So a node that does not send
its token fails, as with a gated model.

A model is a folder `models`/<owner>/<name>. Its only revision, also called "main", is a hash of its
content. The headers and errors are those that `huggingface_hub` expects: `file_download.py` (ETag,
X-Repo-Commit, Content-Length) and `utils/_http.py` (X-Error-Code).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, with the body `body` or the file at `path`."""

    status: HTTPStatus
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    path: Path | None = None


_Describe = Callable[[str, Path], Answer]


def answer(models: Path, target: str, authorization: str, token: str) -> Answer:
    """
    Answer a request for `target`, the path below the hub's prefix, such as
    `api/models/lab/tiny/revision/main` or `lab/tiny/resolve/main/config.json`.

    `authorization` is the request's header ("" when absent), which must contain `token`.
    """
    if refused := _refuse(authorization, token):
        return refused
    parts = [unquote(part) for part in target.strip("/").split("/")]
    match parts:
        case ["api", "models", owner, name]:
            return _model(models, f"{owner}/{name}", "main", _info)
        case ["api", "models", owner, name, "revision", revision]:
            return _model(models, f"{owner}/{name}", revision, _info)
        case ["api", "models", owner, name, "tree", revision, *_]:
            return _model(models, f"{owner}/{name}", revision, _tree)
        case [owner, name, "resolve", revision, *inner] if inner:
            return _file(models, f"{owner}/{name}", revision, "/".join(inner))
        case ["api", "whoami-v2"]:
            return _json({"type": "user", "name": "lab", "orgs": []})
    return _error(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")


def revision_of(model: Path) -> str:
    """Return the only revision of the model in the folder `model`: 40 hex digits of its content."""
    return hashlib.sha1(
        "".join(f"{name} {_sha256(file)}\n" for name, file in _files(model).items()).encode()
    ).hexdigest()


def _refuse(authorization: str, token: str) -> Answer | None:
    if token and hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        return None
    # The hub's answers: it does not reveal whether a repository exists, a wrong token is called
    # wrong
    if authorization:
        message = "Invalid credentials in Authorization header"
        return _error(HTTPStatus.UNAUTHORIZED, "", message)
    return _error(HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Repository not found")


def _model(models: Path, repository: str, revision: str, describe: _Describe) -> Answer:
    folder = _folder(models, repository)
    if folder is None:
        return _error(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
    if revision not in ("main", revision_of(folder)):
        return _error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
    return describe(repository, folder)


def _info(repository: str, folder: Path) -> Answer:
    return _json(
        {
            "_id": revision_of(folder)[:24],
            "id": repository,
            "modelId": repository,
            "author": repository.split("/", maxsplit=1)[0],
            "sha": revision_of(folder),
            "private": True,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": ["safetensors", "llama"],
            "pipeline_tag": "text-generation",
            "library_name": "transformers",
            "lastModified": "2026-01-01T00:00:00.000Z",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": name} for name in _files(folder)],
        }
    )


def _tree(repository: str, folder: Path) -> Answer:
    del repository
    return _json(
        [
            {
                "type": "file",
                "oid": _sha256(file)[:40],
                "size": file.stat().st_size,
                "path": name,
            }
            for name, file in _files(folder).items()
        ]
    )


def _file(models: Path, repository: str, revision: str, inner: str) -> Answer:
    found = _model(models, repository, revision, _info)
    folder = _folder(models, repository)
    if found.status is not HTTPStatus.OK or folder is None:
        return found
    if file := _files(folder).get(inner):
        headers = {"ETag": f'"{_sha256(file)}"', "X-Repo-Commit": revision_of(folder)}
        return Answer(HTTPStatus.OK, headers, path=file)
    commit = {"X-Repo-Commit": revision_of(folder)}
    return _error(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found", commit)


def _folder(models: Path, repository: str) -> Path | None:
    """Return the folder of an existing model name, so that no name can lead elsewhere."""
    return next(
        (
            folder
            for folder in sorted(models.glob("*/*"))
            if folder.is_dir() and str(folder.relative_to(models)) == repository
        ),
        None,
    )


def _files(model: Path) -> dict[str, Path]:
    """Return a model's files by their paths below the model's folder."""
    found = sorted(path for path in model.rglob("*") if path.is_file())
    return {path.relative_to(model).as_posix(): path for path in found}


_hashes: dict[tuple[str, int, int], str] = {}


def _sha256(path: Path) -> str:
    """Return a file's hash, cached by version because clients ask for each several times."""
    stat = path.stat()
    key = (str(path), stat.st_mtime_ns, stat.st_size)
    if key not in _hashes:
        _hashes[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return _hashes[key]


def _json(document: object) -> Answer:
    body = json.dumps(document).encode()
    return Answer(HTTPStatus.OK, {"Content-Type": "application/json; charset=utf-8"}, body)


def _error(
    status: HTTPStatus, code: str, message: str, headers: Mapping[str, str] | None = None
) -> Answer:
    told = {"Content-Type": "application/json; charset=utf-8", "X-Error-Message": message}
    if code:
        told["X-Error-Code"] = code
    body = json.dumps({"error": message}).encode()
    return Answer(status, {**told, **(headers or {})}, body)
