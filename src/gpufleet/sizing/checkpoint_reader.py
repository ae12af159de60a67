"""Read a model's files for sizing, from a directory or from the Hugging Face Hub.

This module reads files and queries the Hub. It does not read the weights, but only the headers of
their files: some kilobytes at the beginning of each safetensors file. It stops reading after the
header, even if the Hub sends the whole file.

The module uses the Hub's own client, so the client's settings apply: HF_ENDPOINT, HF_HOME,
HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN_PATH, and the token of `hf auth login`. A token is read from
a file, never from the command line.
"""

from __future__ import annotations

import json
import logging
import math
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpufleet.errors import FleetError, file_fault, json_fault
from gpufleet.remote.daemon_pool import DaemonPool
from gpufleet.sizing import adapter_config, mistral_format
from gpufleet.sizing.adapter_config import AdapterConfig
from gpufleet.sizing.architectures.description import ModelFiles, Stored

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
MODULES = "modules.json"
SINGLE = "model.safetensors"

SECONDS = 60.0
"""Deadline in seconds for one model."""

_GGUF = re.compile(r"(?i)\.gguf$|-gguf:")
"""Matches the name of a GGUF file, and vLLM's notation `REPOSITORY-GGUF:FILE`."""
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
_PASSWORD = re.compile(r"//[^/\s@]+@")
_LARGEST_HEADER = 100_000_000
"""The largest header that the safetensors format allows."""
_FIRST_BYTES = 1 << 20
"""Number of bytes of a header that are read first. Most headers are smaller."""
_AT_ONCE = 16

_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True)
class Hub:
    """
    Settings for the Hub. If a field is None, the configuration of the Hub's client applies.
    """

    endpoint: str | None = None
    token_file: str | None = None
    cache: str | None = None
    offline: bool = False
    """Whether to read only from the cache."""


class HubSilentError(FleetError):
    """The Hub does not answer, so a model's name and files cannot be checked."""


def read(
    model: str, *, revision: str | None = None, hub: Hub | None = None, seconds: float = SECONDS
) -> ModelFiles:
    """
    Return the files of `model`, which is a directory, a `config.json`, or a name on the Hub.

    If the model has no `config.json`, Mistral's `params.json` is read instead. Raises `FleetError`
    if the model does not exist or has neither file, if a file's format is not the expected one, or
    if the Hub does not answer within `seconds`.
    """
    if _GGUF.search(model):
        raise FleetError(
            f"{model}: gpufleet cannot compute the memory of GGUF files: write a checkpoint of "
            "the same model in safetensors, quantized or not"
        )
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _read_directory(path)
        if path.is_file():
            whole = path.name in {CONFIG, mistral_format.PARAMS}
            return _read_directory(path.parent) if whole else _read_config(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~USER of a user that does not exist
        raise FleetError(
            f"{model[:200]}: the model's files cannot be read: {_first_line(error)}"
        ) from None
    if model.startswith((".", "/", "~")) or not _REPOSITORY.fullmatch(model):
        raise FleetError(
            f"{model}: this directory or file does not exist: write a model's directory, its "
            "config.json, or its name on the Hugging Face Hub (owner/name)"
        )
    return _run_within(
        seconds, lambda: _read_from_hub(model, revision, hub or Hub(), seconds), model
    )


def read_adapter(
    repository: str, revision: str, hub: Hub, seconds: float = SECONDS
) -> AdapterConfig:
    """Return the config of a LoRA adapter on the Hub. Raises `FleetError` if it cannot be read."""
    name = adapter_config.FILE

    def ask() -> Path | None:
        return _file_source(repository, revision, hub, name)(name)

    if (found := _run_within(seconds, ask, repository)) is None:
        raise FleetError(
            f"{repository}: the repository has no {name} on the Hub, so it is not a LoRA adapter"
        )
    return read_adapter_file(found)


def read_adapter_file(file: Path) -> AdapterConfig:
    """
    Return the config in a local `adapter_config.json`.

    Raises `FleetError` if it cannot be read.
    """
    try:
        text = file.read_bytes()
    except OSError as error:
        raise FleetError(f"{file}: the file cannot be read: {_first_line(error)}") from None
    return adapter_config.parse_adapter(_parse_json(text, str(file)))


# -- from a directory ------------------------------------------------------------------------------


def _read_config(path: Path) -> ModelFiles:
    return ModelFiles(_parse_json(path.read_bytes(), str(path)), origin=str(path))


def _read_directory(folder: Path) -> ModelFiles:
    if not (folder / CONFIG).is_file():
        if (params := folder / mistral_format.PARAMS).is_file():
            index = folder / mistral_format.INDEX
            return _in_mistrals_format(params, index if index.is_file() else None, str(folder))
        raise FleetError(
            f"{folder}: the directory has no {CONFIG}, which describes the model: write the "
            "directory of the checkpoint"
        )

    def optional(name: str) -> Any:
        file = folder / name
        return _parse_json(file.read_bytes(), str(file)) if file.is_file() else None

    index = optional(INDEX)
    names = _weight_files(index, str(folder / INDEX))
    files = [folder / name for name in names]
    complete = all(file.is_file() for file in files)
    return ModelFiles(
        config=optional(CONFIG),
        hf_quant_config=optional(HF_QUANT_CONFIG),
        stored=_merge_headers(_read_local_header(file) for file in files) if complete else None,
        stored_bytes=_total_size(index),
        modules=_read_modules(folder / MODULES),
        origin=str(folder),
    )


def _read_modules(file: Path | None) -> list[Any] | None:
    """Return the list in modules.json, or None if the file does not exist or has no list."""
    if file is None or not file.is_file():
        return None
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _in_mistrals_format(params: Path, index: Path | None, origin: str) -> ModelFiles:
    """
    Return the files of a model in Mistral's format.

    Headers of tensors are not read, because the tensors' names differ from the usual ones.
    """
    indexed = _parse_json(index.read_bytes(), str(index)) if index else None
    return ModelFiles(
        config=mistral_format.config_of(_parse_json(params.read_bytes(), str(params)), origin),
        stored_bytes=_total_size(indexed),
        origin=origin,
    )


def _read_local_header(file: Path) -> Stored:
    with file.open("rb") as opened:
        size = _header_size(opened.read(8), str(file))
        return _parse_header(opened.read(size), str(file))


# -- from the Hub ----------------------------------------------------------------------------------


def _read_from_hub(model: str, revision: str | None, hub: Hub, seconds: float) -> ModelFiles:
    # The headers may use most of the time. Without the headers, the total in the index is used.
    headers_until = time.monotonic() + 0.8 * seconds
    file = _file_source(model, revision, hub, CONFIG)
    config = file(CONFIG)
    if config is None and (params := file(mistral_format.PARAMS)) is not None:
        return _in_mistrals_format(params, file(mistral_format.INDEX), model)
    if config is None:
        raise FleetError(
            f"{model}: the repository has no {CONFIG} on the Hub, so gpufleet does not know the "
            "model's architecture. GGUF files and adapters have no such file: for these, write "
            "the base model"
        )
    quantized, indexed = file(HF_QUANT_CONFIG), file(INDEX)
    index = _parse_json(indexed.read_bytes(), str(indexed)) if indexed else None
    # The snapshot's folder has the commit as its name, so all headers are read from this commit.
    commit = config.parent.name
    stored, notes = _read_headers(model, commit, index, hub, _token(hub), until=headers_until)
    return ModelFiles(
        config=_parse_json(config.read_bytes(), f"{model}: {CONFIG}"),
        hf_quant_config=_parse_json(quantized.read_bytes(), f"{model}: {HF_QUANT_CONFIG}")
        if quantized
        else None,
        stored=stored,
        stored_bytes=_total_size(index),
        modules=_read_modules(file(MODULES)),
        origin=model,
        notes=notes,
    )


def _file_source(
    model: str, revision: str | None, hub: Hub, required: str
) -> Callable[[str], Path | None]:
    """
    Return a function that fetches a file of `model` by name, or None if the file is missing.

    The function raises `FleetError` if the Hub cannot be queried. If a file is only missing in the
    cache, the function raises the error for the `required` file, and returns None for others.
    """
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import logging as hub_logging

    # gpufleet reports the error itself, once. The client's own function sets the level, because
    # importing more of the client resets the level of the logger.
    hub_logging.set_verbosity(logging.CRITICAL)
    token = _token(hub)
    unreachable = _connection_error(model, revision, hub, token)

    def file(name: str) -> Path | None:
        try:
            return Path(
                huggingface_hub.hf_hub_download(
                    model,
                    name,
                    revision=revision,
                    endpoint=hub.endpoint,
                    token=token,
                    cache_dir=hub.cache,
                    local_files_only=hub.offline or unreachable is not None,
                )
            )
        except errors.LocalEntryNotFoundError as error:
            if name == required:
                raise _hub_error(unreachable or error, model, revision, hub) from None
            return None
        except errors.EntryNotFoundError:
            return None
        except (OSError, ValueError, errors.RevisionResolutionError) as error:
            raise _hub_error(error, model, revision, hub) from None

    return file


def _connection_error(
    model: str, revision: str | None, hub: Hub, token: str | None
) -> Exception | None:
    """
    Return the error of one request to the Hub, or None if it succeeds.

    The request is made first because the client itself would retry for 30 s.
    """
    import httpx2
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import get_session

    if hub.offline or constants.HF_HUB_OFFLINE:
        return None
    url = huggingface_hub.hf_hub_url(model, CONFIG, revision=revision, endpoint=hub.endpoint)
    try:
        get_session().head(url, headers=build_hf_headers(token=token), timeout=10)
    except (httpx2.HTTPError, OSError) as error:
        return error
    return None


def _read_headers(
    model: str,
    commit: str,
    index: Mapping[str, Any] | None,
    hub: Hub,
    token: str | None,
    *,
    until: float,
) -> tuple[Stored | None, tuple[str, ...]]:
    """
    Return the merged headers of all weight files, or None and the reason why one is missing.
    """
    import httpx2
    import huggingface_hub
    from huggingface_hub import constants, errors

    names = _weight_files(index, f"{model}: {INDEX}")
    cached = [
        huggingface_hub.try_to_load_from_cache(model, name, cache_dir=hub.cache, revision=commit)
        for name in names
    ]
    if all(isinstance(path, str) for path in cached):
        return _merge_headers(_read_local_header(Path(str(path))) for path in cached), ()
    if hub.offline or constants.HF_HUB_OFFLINE:
        return None, (
            ("the weights' files are not in the cache, so gpufleet did not read their headers"),
        )

    def header(name: str) -> Stored:
        url = huggingface_hub.hf_hub_url(model, name, revision=commit, endpoint=hub.endpoint)
        return _read_remote_header(url, token, f"{model}: {name}", until)

    try:
        with DaemonPool(min(_AT_ONCE, len(names))) as pool:
            return _merge_headers(pool.map(header, names)), ()
    except errors.EntryNotFoundError:
        return None, (
            (
                "the model has no safetensors files, so gpufleet could not read the list of stored "
                "tensors from their headers"
            ),
        )
    except (OSError, httpx2.HTTPError) as error:
        return None, (
            (f"gpufleet could not read the headers of the weights' files: {_first_line(error)}"),
        )


def _read_remote_header(url: str, token: str | None, name: str, until: float) -> Stored:
    """Read only a file's header, even if the server sends the whole file."""
    got = _read_front(url, token, _FIRST_BYTES, lambda data: _header_end(data, name), until)
    size = _header_size(got[:8], name)
    if len(got) < 8 + size:
        got = _read_front(url, token, 8 + size, lambda _: 8 + size, until)
    return _parse_header(got[8 : 8 + size], name)


def _header_end(data: bytes, name: str) -> int:
    return 8 if len(data) < 8 else 8 + _header_size(data[:8], name)


def _read_front(
    url: str, token: str | None, size: int, needed: Callable[[bytes], int], until: float
) -> bytes:
    """
    Return the first bytes at `url`: as many as `needed` requires, but at most about `size`.

    `needed` gets the bytes read so far and returns the required number of bytes. Raises
    `TimeoutError` at the time `until`, even if a server keeps sending single bytes.
    """
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import get_session, hf_raise_for_status

    headers = {**build_hf_headers(token=token), "Range": f"bytes=0-{size - 1}"}
    got = b""
    if time.monotonic() > until:
        raise TimeoutError("the Hub is too slow")
    with get_session().stream("GET", url, headers=headers, timeout=10) as response:
        hf_raise_for_status(response)
        # Read pieces of any size: a slow server might need hours for a first piece of fixed size.
        for chunk in response.iter_bytes():
            got += chunk
            if time.monotonic() > until:
                raise TimeoutError("the Hub is too slow")
            if len(got) >= min(size, needed(got)):
                break
    return got


def _token(hub: Hub) -> str | None:
    if hub.token_file is None:
        return None
    try:
        token = Path(hub.token_file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise FleetError(
            f"{hub.token_file}: gpufleet cannot read the Hub's token from this file: {error}"
        ) from None
    if not token:
        raise FleetError(f"{hub.token_file}: the file is empty: write the Hub's token into it")
    return token


def _hub_error(error: Exception, model: str, revision: str | None, hub: Hub) -> FleetError:
    """Return the error message for the reason why the Hub's client could not get a file."""
    from huggingface_hub import constants, errors

    # A mirror's address may have a password in it.
    endpoint = _PASSWORD.sub("//", hub.endpoint or constants.ENDPOINT)
    if isinstance(error, errors.GatedRepoError):
        return FleetError(
            f"{model}: access to the model is restricted (gated). Accept the model's terms on "
            "the Hub, and write a token of the same account into a file (HF_TOKEN_PATH, or "
            "--hf-token-file)"
        )
    if isinstance(error, errors.RevisionNotFoundError | errors.RevisionResolutionError):
        return FleetError(f"{model}: the model has no revision {revision!r} at {endpoint}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return FleetError(
            f"{model}: {endpoint} does not have this model, or does not show it with this token. "
            "Check the name. If the model is private, set the file of a token that can read it "
            "(HF_TOKEN_PATH, or --hf-token-file)"
        )
    if isinstance(error, errors.OfflineModeIsEnabled) or hub.offline or constants.HF_HUB_OFFLINE:
        return FleetError(
            f"{model}: the model is not in the cache {hub.cache or constants.HF_HUB_CACHE}, and "
            "gpufleet does not use the Hub because of HF_HUB_OFFLINE. Download the model's "
            "config.json first, or write a directory with it"
        )
    if isinstance(error, errors.HFValidationError):
        return FleetError(f"{model}: this is not the name of a model on the Hub (owner/name)")
    return HubSilentError(
        f"{model}: {endpoint} cannot be reached: {_first_line(error)}. If this machine has no "
        "access to the Hub, set HF_ENDPOINT to a mirror, or write a directory with the model's "
        "config.json"
    )


# -- the contents of a file ------------------------------------------------------------------------


def _parse_json(text: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        why = f"line {error.lineno}, {json_fault(error)}"
        raise FleetError(f"{name}: this is not JSON: {why}") from None
    except ValueError as error:
        raise FleetError(f"{name}: this is not JSON: {file_fault(error)}") from None
    except RecursionError:
        raise FleetError(
            f"{name}: this has more nested levels than a model's file can have"
        ) from None
    if not isinstance(found, dict):
        kind = "nothing" if found is None else f"a {type(found).__name__}"
        raise FleetError(f"{name}: this is {kind}, but must be an object")
    return found


def _weight_files(index: Mapping[str, Any] | None, name: str) -> list[str]:
    """Return the names of the weight files from the index, or the single file without an index."""
    if not index:
        return [SINGLE]
    files = index.get("weight_map", {})
    if not isinstance(files, Mapping) or not all(map(_is_below, files.values())):
        raise FleetError(
            f"{name}: `weight_map` does not have a file name for each tensor: use the "
            "publisher's original file"
        )
    return sorted(set(files.values()))


def _is_below(file: Any) -> bool:
    """Return whether a value is the name of a file below the model's directory."""
    return isinstance(file, str) and not file.startswith("/") and ".." not in file.split("/")


def _total_size(index: Mapping[str, Any] | None) -> int | None:
    metadata = (index or {}).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(size, int | float) and 0 < size < math.inf:
        return int(size)
    return None


def _header_size(first: bytes, name: str) -> int:
    if len(first) == 8:
        (size,) = struct.unpack("<Q", first)
        if 2 <= size <= _LARGEST_HEADER:
            return int(size)
    raise FleetError(
        f"{name}: this is not a safetensors file. Check whether the download is complete: a Git "
        "LFS pointer, for example, is only a text of three lines"
    )


def _parse_header(text: bytes, name: str) -> Stored:
    entries = _parse_json(text, f"{name}: the header")
    try:
        return {
            tensor: (str(entry["dtype"]), tuple(int(length) for length in entry["shape"]))
            for tensor, entry in entries.items()
            if tensor != "__metadata__"
        }
    except (KeyError, TypeError, ValueError):
        raise FleetError(f"{name}: the file's header is not valid safetensors") from None


def _merge_headers(headers: Iterable[Stored]) -> Stored:
    merged: dict[str, tuple[str, tuple[int, ...]]] = {}
    for header in headers:
        merged.update(header)
    return merged


def _first_line(error: Exception) -> str:
    return _PASSWORD.sub("//", (str(error).strip() or type(error).__name__).splitlines()[0])


def _run_within(seconds: float, work: Callable[[], _Found], model: str) -> _Found:
    """Run `work` in a separate thread, and give up after `seconds`."""
    found: list[_Found] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise HubSilentError(
            f"{model}: the Hub did not send the model's files within {seconds:g} s: try again, "
            "or write a directory with the model's config.json"
        )
    return found[0]
