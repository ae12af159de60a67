"""RUNS ON THE NODE: identify a model directory's content without reading all of it.

A file of at most `WHOLE_BYTES` (configurations, tokenizers, the index of the weights) is identified
by the SHA-256 of its content. A larger file (weights) is identified by its size and the SHA-256 of
both ends: safetensors begins with the names, types and positions of its tensors, and a copy that
was truncated or filled with zeros ends differently. Reading the weights would take as long as
loading them.

The files are read with the account that will load them, so that unreadable files are found.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Dict, Iterator, Tuple

from gpufleet.on_node.common.answers import CannotRead

WHOLE_BYTES = 16 << 20
END_BYTES = 1 << 16
# Two hundred are a large checkpoint; a folder that holds much more is no model's.
MOST_FILES = 5000

# What vLLM and transformers read: weights, configurations, tokenizers, templates, code.
SUFFIXES = (
    *(".bin", ".gguf", ".pt", ".pth", ".safetensors"),
    *(".jinja", ".json", ".jsonl", ".model", ".py", ".tiktoken", ".txt", ".yaml"),
)


def files(directory: str, user: str) -> Dict[str, Any]:
    """
    Return {path below `directory`: [bytes, digest]} for a model's files.

    This changes the process' account to `user` permanently, if it is root and the account exists.
    Raises `CannotRead` for a directory without such files, and for files that `user` may not read.
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
        raise CannotRead("absent", detail="no file of a model in %s" % directory)
    return found


def refusal(path: str) -> str:
    """Return why this account cannot read a path: `absent` or `no_permission`."""
    try:
        os.stat(path)
    except PermissionError:
        return "no_permission"
    except OSError:
        pass
    return "absent"


def walk_files(directory: str) -> Iterator[Tuple[str, str]]:
    """Yield (relative name, path) of each of a model's files; links to files are followed."""
    if os.path.isfile(directory):  # a GGUF file is a model by itself
        yield os.path.basename(directory), directory
    for folder, folders, names in os.walk(directory):
        # Downloads in progress, and what belongs to git.
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.splitext(name)[1] in SUFFIXES and not name.startswith("."):
                yield os.path.relpath(path, directory), path


def size_and_digest(path: str) -> Tuple[int, str]:
    """Return a file's size, and the digest of its content or of both ends."""
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
    """Change this process' user to `user` permanently, if it is root and the account exists."""
    import pwd

    if os.geteuid() != 0:
        return
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return  # the account comes with the deploy
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
