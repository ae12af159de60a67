"""RUNS ON THE NODE: read the facts that only `gpufleet preflight` needs.

Takes (JSON header `PARAMETERS`):
  names    host names to resolve
  pages    {id: {"url", "body": whether to return the body of a response 200}}; pages are fetched
           without credentials
  tls      {id: {"host", "port", "authorities": PEM, or null for the system's authorities,
           "name": whether the certificate must be valid for the host's name}}
  models   {directory: {file: [algorithm, digest]}}; null instead of the files if no lock has them
  folders  directories whose sizes are measured
Prints one JSON document. A value that could not be read is {"missing": reason}.
  schema    1
  began, clock   the node's time when the program began and when it ended, in seconds since 1970
  names     {name: [address, ...]}; {"missing": "absent"} if the name cannot be resolved
  pages     {id: {"status": HTTP status, "body": text if it was wanted, "error": the reason if there
            is no response}}
  tls       {id: {"verified": bool, "why": sentence, "certificate": base64 of DER, or "" if there is
            none}}
  models    {directory: {"complete": bool, "missing", "extra", "changed", "wrong": [file, ...],
            "hashed": number of files, "bytes"}}. Files in `changed` were written after the model
            was complete. Files in `wrong` have a wrong hash. Only files of at most 16 MiB are
            hashed
  folders   {directory: bytes}
  firewall  whether nftables has the table `inet gpufleet`

The program changes nothing. Each question has its own process and deadline. The program needs only
Python 3.8 and the standard library.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from typing import Any, Dict, Iterator, List, Optional, Tuple

from gpufleet.on_node.common.answers import CannotRead
from gpufleet.on_node.common.commands import run
from gpufleet.on_node.common.forked import Watch
from gpufleet.on_node.common.model_folder import MARK, NOTES, changed_files, shards, sizes
from gpufleet.on_node.transfer import folder_size
from gpufleet.on_node.transfer.model_hashes import hash_file

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# In seconds. By default (resolv.conf(5)), a name server is queried twice, for five seconds each.
NAME_SECONDS = 11
REQUEST_SECONDS = 6
# Enough for a hundred weight files on a network file system, or for a virtual environment of 30,000
# files that are not in the page cache.
FILES_SECONDS = 15
FIREWALL_SECONDS = 5
BODY_BYTES = 1 << 20
# Larger files of a model (weights) are not hashed by this program. They are hashed when they are
# placed.
HASHED_BYTES = 16 << 20
NAMED = 20  # the most files of a kind whose names are returned
# X509_V_FLAG_PARTIAL_CHAIN of OpenSSL (x509_vfy.h): a given certificate is trusted even if it is
# not self-signed. Python has a constant for this flag since 3.10.
PARTIAL_CHAIN = 0x80000


def main() -> None:
    """Read all facts and print the document."""
    began = time.time()
    given, watch = PARAMETERS, Watch()
    questions: Dict[Tuple[str, str], Any] = {}
    for name in given["names"]:
        questions["names", name] = (partial(resolve, name), NAME_SECONDS)
    for key, asked in given["pages"].items():
        questions["pages", key] = (partial(fetch_page, asked), REQUEST_SECONDS + 1)
    for key, asked in given["tls"].items():
        questions["tls", key] = (partial(handshakes, asked), 2 * REQUEST_SECONDS + 1)
    for folder, files in given["models"].items():
        questions["models", folder] = (partial(model, folder, files), FILES_SECONDS)
    for folder in given["folders"]:
        questions["folders", folder] = (partial(folder_bytes, folder), FILES_SECONDS)
    questions["firewall", ""] = (has_firewall_table, FIREWALL_SECONDS)
    for each, (function, seconds) in questions.items():
        watch.ask(each, function, seconds)
    answers = watch.answers(*questions)
    watch.stop()
    document: Dict[str, Any] = {"schema": 1, "began": began}
    for part in ("names", "pages", "tls", "models", "folders"):
        document[part] = {key: said for (kind, key), said in answers.items() if kind == part}
    document["firewall"] = answers["firewall", ""]
    document["clock"] = time.time()
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


def resolve(name: str) -> List[str]:
    """Return the addresses that programs on this node get for a name."""
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            raise CannotRead("absent", detail=str(error)) from error
        raise CannotRead("error", detail=str(error)) from error
    return sorted({str(each[4][0]).partition("%")[0] for each in found})


def fetch_page(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Return a server's response to a request that has no key and no password."""
    # The certificate is not verified, because no secret is sent. `handshakes` verifies it.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _Stays())
    request = urllib.request.Request(asked["url"], headers={"User-Agent": "gpufleet"})
    try:
        with opener.open(request, timeout=REQUEST_SECONDS) as answer:
            text = answer.read(BODY_BYTES).decode("utf-8", "replace") if asked["body"] else ""
            return {"status": answer.status, **({"body": text} if asked["body"] else {})}
    except urllib.error.HTTPError as error:
        return {"status": error.code}
    except urllib.error.URLError as error:
        return {"error": str(error.reason)}
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, error)}


class _Stays(urllib.request.HTTPRedirectHandler):
    """
    A handler that returns a redirect as a response, because it shows that the server is reachable.
    """

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def handshakes(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Return whether a server's certificate is valid, and return the certificate itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = bool(asked["name"])
    try:
        if asked["authorities"] is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cadata=asked["authorities"])
            context.verify_flags = ssl.VerifyFlags(int(context.verify_flags) | PARTIAL_CHAIN)
        shown = handshake(asked, context)
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message or str(error)
    except Exception as error:
        return {"verified": False, "why": str(error) or type(error).__name__, "certificate": ""}
    else:
        return {"verified": True, "why": "", "certificate": shown}
    # Connect again without verification, to get the certificate that was not accepted.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        shown = handshake(asked, context)
    except Exception:
        shown = ""
    return {"verified": False, "why": why, "certificate": shown}


def handshake(asked: Dict[str, Any], context: ssl.SSLContext) -> str:
    """Return a server's certificate as base64 of DER. Errors of the connection are raised."""
    place = (asked["host"], asked["port"])
    plain = socket.create_connection(place, timeout=REQUEST_SECONDS)
    try:
        with context.wrap_socket(plain, server_hostname=asked["host"]) as secured:
            return base64.b64encode(secured.getpeercert(binary_form=True) or b"").decode()
    finally:
        plain.close()


def model(directory: str, files: Optional[Dict[str, List[str]]]) -> Dict[str, Any]:
    """
    Return whether a model is complete, which of its files are wrong, and which were changed later.
    """
    there = dict(sizes(directory))
    known = {name for name in there if name != MARK and not name.startswith(NOTES)}
    wanted = set(shards(directory)) if files is None else set(files)
    complete = MARK in there
    small = [name for name in sorted(known & set(files or {})) if there[name] <= HASHED_BYTES]
    return {
        "complete": complete,
        "missing": sorted(wanted - known)[:NAMED],
        "extra": sorted(known - wanted)[:NAMED] if files is not None else [],
        "changed": list(changed_files(directory, known))[:NAMED] if complete else [],
        "wrong": list(other_hashes(directory, small, files or {}))[:NAMED],
        "hashed": len(small),
        "bytes": sum(there.values()),
    }


def other_hashes(directory: str, names: List[str], files: Dict[str, List[str]]) -> Iterator[str]:
    """Yield the files whose hash differs from the hash in the lock."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names:
            algorithm, digest = files[name]
            if hash_file(folder, name, algorithm) != digest:
                yield name
    finally:
        os.close(folder)


def folder_bytes(folder: str) -> int:
    """Return a folder's size in bytes. Raises `CannotRead` if the folder does not exist."""
    if not os.path.isdir(folder):
        raise CannotRead("absent")
    return folder_size.size(folder)


def has_firewall_table() -> bool:
    """Return whether gpufleet's nftables table is loaded."""
    output = run("nft", "list", "table", "inet", "gpufleet", seconds=FIREWALL_SECONDS - 1)
    return output.status == 0


if __name__ == "__main__":
    main()
