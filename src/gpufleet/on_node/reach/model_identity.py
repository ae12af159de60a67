"""RUNS ON THE NODE: identify a model directory's content without reading all of it.

A file of at most `WHOLE_BYTES` (configurations, tokenizers, the index of the weights) is identified
by the SHA-256 of its content. A larger file (weights) is identified by its size, and by the SHA-256
of its beginning and its end. A safetensors file begins with the names, types and positions of its
tensors. If a copy was truncated or filled with zeros, its end differs. Reading all weights would
take as long as loading them.

The files are read with the account that will load them, so that files that this account cannot read
are found.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Dict, Iterator, Tuple

from gpufleet.on_node.common.answers import CannotRead

WHOLE_BYTES = 16 << 20
END_BYTES = 1 << 16
# A large checkpoint has two hundred files. A folder with many more files is not a model's folder.
MOST_FILES = 5000

# Endings of the files that vLLM and transformers read: weights, configurations, tokenizers,
# templates, code.
SUFFIXES = (
    *(".bin", ".gguf", ".pt", ".pth", ".safetensors"),
    *(".jinja", ".json", ".jsonl", ".model", ".py", ".tiktoken", ".txt", ".yaml"),
)


def files(directory: str, user: str) -> Dict[str, Any]:
    """
    Return {path below `directory`: [bytes, digest]} for a model's files.

    If this process runs as root and the account `user` exists, the process permanently changes to
    this account. Raises `CannotRead` if the directory has no such files, or if `user` may not read
    one of them.
    """
    become(user)
    if not os.path.exists(directory):
        raise CannotRead(refusal(directory), detail=directory)
    found: Dict[str, Any] = {}
    for name, path in walk_files(directory):
        if len(found) >= MOST_FILES:
            raise CannotRead("implausible", detail="more than %d files" % MOST_FILES)
        try:
            found[name] = size_and_digest(path)
        except OSError as error:
            raise CannotRead(
                "no_permission" if isinstance(error, PermissionError) else "error",
                detail="%s: %s" % (path, error.strerror),
            ) from None
    if not found:
        raise CannotRead("absent", detail="no files of a model in %s" % directory)
    return found


def refusal(path: str) -> str:
    """Return the reason why this account cannot read a path: `absent` or `no_permission`."""
    try:
        os.stat(path)
    except PermissionError:
        return "no_permission"
    except OSError:
        pass
    return "absent"


def walk_files(directory: str) -> Iterator[Tuple[str, str]]:
    """Yield (relative name, path) of each file of a model. Links to files are followed."""
    if os.path.isfile(directory):  # a GGUF file is a model by itself
        yield os.path.basename(directory), directory
    for folder, folders, names in os.walk(directory):
        # Leave out downloads in progress and git's files.
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.splitext(name)[1] in SUFFIXES and not name.startswith("."):
                yield os.path.relpath(path, directory), path


def size_and_digest(path: str) -> Tuple[int, str]:
    """Return a file's size, and the digest of its content or of its beginning and end."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= WHOLE_BYTES:
            read = hashlib.sha256(file.read())
        else:
            read = hashlib.sha256(file.read(END_BYTES))
            file.seek(-END_BYTES, os.SEEK_END)
            read.update(file.read())
    return size, read.hexdigest()[:16]


def become(user: str) -> None:
    """
    Permanently change this process' account to `user`.

    Nothing changes if the process does not run as root, or if the account does not exist.
    """
    import pwd

    if os.geteuid() != 0:
        return
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return  # the deploy will create the account
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
