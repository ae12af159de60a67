"""RUNS ON THE NODE: serve a finished directory tree to other nodes, or download it from them.

Takes (`PARAMETERS`) an `action`:
  look      report whether the tree is complete on this node, and the kind of this node
  describe  read the tree, store its manifest on this node, and report the tree's name, which is a
            SHA-256
  serve     serve the tree until all expected nodes have it
  fetch     download the tree and serve its pieces at the same time; then move the tree to its final
            path, and continue to serve it until the end
and
  directory, mark      the tree, and the file in it that marks it as complete
  manifests            directory of the trees' manifests; for `look`, "" means no directory
  leave_out            names at the top of the tree that belong only to this node and are not part
                       of the tree
  python               for `look` and `describe`: the interpreter for which such a tree is made; "":
                       the tree does not depend on an interpreter
  lock                 a lock file that is held so that no build or removal runs at the same time;
                       "": no lock
  own, token           this node's name, and the secret that all nodes of this run know
  address, port        where this node listens
  rate_mbit            limit of the rate at which this node sends, in Mbit/s; null: no limit
  expected             which node gets which half from this node, for example "gpu-02/1"
  digest               for `serve` and `fetch`: the manifest's name
  halves               for `fetch`: [name, host, port] of the sources of pieces with even numbers,
                       and of pieces with odd numbers, with the best source first
  remove               for `fetch`: files to remove when the tree is complete
  files                for `fetch`: the hashes that a model's files must have; null: the hashes are
                       not checked
  seconds              time after which the program ends, even if pieces are missing
Prints one JSON document:
  schema    1
  error     the reason of a failure; "" if there was none
  look:     whole, kind (equal on two nodes if the same tree works on both), digest ("" if the tree
            was not read after it was completed)
  describe: digest, bytes, files, kind
  serve:    sent
  fetch:    bytes, found (bytes that an earlier run had left here), sent, seconds, port (where this
            node listened; 0 if it did not), remarks, from {name: bytes}
While the program works, it prints `<bytes> <of bytes>` on standard error. It ends if no process
reads this.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
from typing import Any, Dict, Iterator, List

from gpufleet.on_node.common import file_lock
from gpufleet.on_node.transfer import peers, store
from gpufleet.on_node.transfer.manifest import (
    SCHEMA,
    RefusedError,
    describe_tree,
    pack,
    parse_manifest,
    unpack_manifest,
)

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}

TELL_SECONDS = 2.0
# Time to wait for a build or a removal that is running when a copy begins.
LOCK_SECONDS = 60.0
# All nodes of a run are started within one or two seconds.
PATIENT_SECONDS = 3.0
# The source was already unusable. The time is short, so that no peer waits if the source is dead.
RELEASE_SECONDS = 1.0
# Deadline for the interpreter to print its version.
PYTHON_SECONDS = 10.0


def main() -> None:
    """Run the requested action within its deadline, then print the answer."""
    given = PARAMETERS
    seconds = float(given["seconds"])
    late = threading.Timer(seconds, _late, (seconds,))
    late.daemon = True
    late.start()
    action = {"look": look, "describe": describe, "serve": serve, "fetch": fetch}[given["action"]]
    try:
        found = action(given)
    except (RefusedError, OSError, KeyError, subprocess.SubprocessError) as error:
        found = {"error": str(error) or type(error).__name__}
    late.cancel()
    answer(found)


def answer(found: Dict[str, Any]) -> None:
    """Print the document and exit at once, without waiting for threads."""
    print(json.dumps({"schema": 1, "error": "", **found}))
    sys.stdout.flush()
    os._exit(0)


def _late(seconds: float) -> None:
    answer({"error": "not done within %.0f s" % seconds})


def look(given: Dict[str, Any]) -> Dict[str, Any]:
    """Return whether the tree is complete, the digest of its last reading, and this node's kind."""
    whole = os.path.exists(given["mark"])
    found = kept_manifest(given) if whole and given["manifests"] else None
    digest = hashlib.sha256(found).hexdigest() if found else ""
    return {"whole": whole, "kind": kind(given["python"]), "digest": digest}


def kind(python: str) -> List[str]:
    """Return the platform that an installation's files need: system, machine and interpreter."""
    if not python:
        return []
    said: Dict[str, str] = {}
    with open("/etc/os-release", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.strip().partition("=")
            said[name] = value.strip("\"'")
    program = "import platform as p; print(p.python_implementation(), p.python_version())"
    version = subprocess.run(
        [python, "-I", "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=PYTHON_SECONDS,
        check=True,
    )
    system = "%s %s" % (said.get("ID", "unknown"), said.get("VERSION_ID", ""))
    return [system.strip(), platform.machine(), version.stdout.decode("ascii").strip()]


def describe(given: Dict[str, Any]) -> Dict[str, Any]:
    """
    Return the tree's description.

    The tree is read, unless there is a description that was made after the tree was completed.
    """
    directory, tell = given["directory"], Progress()
    with hold_lock(given["lock"], fcntl.LOCK_SH):
        found = kept_manifest(given)
        if found is None:
            found = describe_tree(directory, given["leave_out"], done=tell.report).manifest()
            save_manifest(given, found)
    made = parse_manifest(found, hashlib.sha256(found).hexdigest(), given["leave_out"])
    files = sum(each.kind == "f" for each in made.entries)
    digest = hashlib.sha256(found).hexdigest()
    what = kind(given["python"])
    return {"digest": digest, "bytes": made.bytes, "files": files, "kind": what}


def serve(given: Dict[str, Any]) -> Dict[str, Any]:
    """Serve the tree until all expected peers have it."""
    with hold_lock(given["lock"], fcntl.LOCK_SH):
        found = kept_manifest(given)
        if found is None:
            raise RefusedError("%s has changed after it was read" % given["directory"])
        made = parse_manifest(found, given["digest"], given["leave_out"])
        files = store.Files(made, store.open_folder(given["directory"]))
        holding = peers.HeldPieces(made, pack(found), files, whole=True)
        server = start_server(given, holding)
        tell = Progress()
        tell.follow(lambda: (server.sent, 0))
        server.linger(set(given["expected"]), time.monotonic() + given["seconds"])
        return {"sent": server.sent}


def start_server(given: Dict[str, Any], holding: peers.HeldPieces) -> peers.Server:
    """Return a server on the given port. Raises `RefusedError` if the port is in use."""
    try:
        return peers.Server(
            holding, given["token"], given["address"], given["port"], given["rate_mbit"]
        )
    except OSError as error:
        raise RefusedError("cannot listen on port %d: %s" % (given["port"], error)) from None


def fetch(given: Dict[str, Any]) -> Dict[str, Any]:
    """Download the tree and move it to its final path."""
    began = time.monotonic()
    if os.path.exists(given["mark"]):
        return {"bytes": 0, "found": 0, "sent": 0, "seconds": 0.0, "port": 0, "from": {}}
    with hold_lock(given["lock"], fcntl.LOCK_EX):
        coming = store.IncomingTree(given["directory"], given["mark"])
        fetching = Fetching(given)
        packed = fetching.manifest()
        found = unpack_manifest(packed)
        made = parse_manifest(found, given["digest"], given["leave_out"])
        coming.prepare(made)
        holding = peers.HeldPieces(made, packed, coming.files, whole=False)
        port, server = 0, None
        try:
            server = start_server(given, holding)
            port = server.port
        except RefusedError as error:  # the clients of this node use other sources
            fetching.remarks.append(str(error))
        coming.find_kept_pieces(holding.add)
        kept = holding.bytes
        coming.require_space(holding.have)
        tell = Progress()
        tell.follow(lambda: (holding.bytes, made.bytes))
        fetching.run(holding, coming)
        coming.finish(given["remove"], given["files"])
        save_manifest(given, found)
        spent = time.monotonic() - began
        if server:
            server.linger(set(given["expected"]), began + given["seconds"])
        return {
            "bytes": made.bytes,
            "found": kept,
            "sent": server.sent if server else 0,
            "seconds": round(spent, 3),
            "port": port,
            "remarks": fetching.remarks[:8],
            "from": fetching.brought,
        }


class Fetching:
    """
    A download of pieces. Each half has its own connection to the best source that answers.
    """

    def __init__(self, given: Dict[str, Any]) -> None:
        self.name, self.token = given["own"], given["token"]
        self.halves = [[peers.Source(*each) for each in half] for half in given["halves"]]
        self.remarks: List[str] = []
        self.brought: Dict[str, int] = {}
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def manifest(self) -> bytes:
        """Return the packed manifest of a peer. Sources may start later than this node."""
        # At first, query only the best source, which may start at the same time as this node.
        # Otherwise all nodes would query the same node.
        patient = time.monotonic() + PATIENT_SECONDS
        at = 0
        while True:
            source = self.halves[0][at % len(self.halves[0])]
            try:
                return peers.manifest(source, self.name, self.token)
            except (OSError, peers.LostError) as error:
                self._give_up("%s: no manifest: %s" % (source.name, error))
            if time.monotonic() > patient:
                at += 1
            time.sleep(0.1)

    def run(self, holding: peers.HeldPieces, coming: store.IncomingTree) -> None:
        """
        Download all missing pieces.

        Raises `RefusedError` if no peer sends a new piece for a long time.
        """
        self._last = time.monotonic()
        threads = [
            threading.Thread(target=self._half, args=(half, holding, coming), daemon=True)
            for half in range(peers.HALVES)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if holding.failed:
            raise RefusedError(holding.failed)

    def _half(self, half: int, holding: peers.HeldPieces, coming: store.IncomingTree) -> None:
        try:
            self._bring(half, holding, coming)
        except Exception as error:
            holding.fail(str(error) or type(error).__name__)

    def _bring(self, half: int, holding: peers.HeldPieces, coming: store.IncomingTree) -> None:
        at, patient = 0, time.monotonic() + PATIENT_SECONDS
        while not holding.failed:
            numbers = [
                number
                for number in range(half, len(holding.tree.pieces), peers.HALVES)
                if number not in holding.have
            ]
            sources = self.halves[half]
            source = sources[at % len(sources)]
            take = self._taking(source.name, holding, coming)
            try:
                with peers.connected(source, self.name, self.token) as lines:
                    peers.download_pieces(
                        lines, holding.tree, numbers, take, holding.have.__contains__
                    )
                    lines.write(b"D %d\n" % half)
            except (OSError, peers.LostError) as error:
                self._give_up("%s: %s" % (source.name, error))
                if isinstance(error, ConnectionRefusedError) and time.monotonic() < patient:
                    time.sleep(0.1)
                    continue
            else:
                if source != sources[0]:
                    self._release(sources[0], half)
                return
            at += 1
            if at % len(sources) == 0:
                time.sleep(0.5)

    def _release(self, source: peers.Source, half: int) -> None:
        """Tell a source that it need not wait, because a different node has sent this half."""
        reached = peers.connected(source, self.name, self.token, seconds=RELEASE_SECONDS)
        with contextlib.suppress(OSError, peers.LostError), reached as lines:
            lines.write(b"D %d\n" % half)

    def _taking(self, source: str, holding: peers.HeldPieces, coming: store.IncomingTree) -> Any:
        def take(number: int, data: memoryview) -> None:
            try:
                coming.write(number, data)
            except OSError as error:
                raise RefusedError("%s cannot be written: %s" % (coming.directory, error)) from None
            with self._lock:
                self._last = time.monotonic()
                self.brought[source] = self.brought.get(source, 0) + len(data)
            holding.add(number)

        return take

    def _give_up(self, why: str) -> None:
        """
        Record why a source could not be used.

        Raises `RefusedError` if no piece has arrived for too long.
        """
        with self._lock:
            if why not in self.remarks:
                self.remarks.append(why)
            since = time.monotonic() - self._last
        if since > peers.GIVE_UP_SECONDS:
            raise RefusedError("nothing was received for %.0f s; %s" % (since, why))


class Progress:
    """Progress on standard error. If no process reads it, the program ends."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def report(self, done: int, total: int) -> None:
        """Print the progress if enough time has passed since the last line."""
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._tell(done, total)

    def follow(self, read: Any) -> None:
        """Start a thread that prints the result of `read` every `TELL_SECONDS`."""

        def tell() -> None:
            while True:
                time.sleep(TELL_SECONDS)
                self._tell(*read())

        threading.Thread(target=tell, daemon=True).start()

    def _tell(self, done: int, total: int) -> None:
        self._told = time.monotonic()
        try:
            os.write(2, b"%d %d\n" % (done, total))
        except OSError:
            os._exit(3)  # the controller has ended, so the run cannot continue


@contextlib.contextmanager
def hold_lock(path: str, how: int) -> Iterator[None]:
    """
    Hold a lock file. Raises `RefusedError` if a different process holds it for a long time.
    """
    if not path:
        yield
        return
    refusal = "%s is locked, because a release is being built or removed on this node" % path
    with file_lock.hold(path, LOCK_SECONDS, lambda: RefusedError(refusal), how, 0o644):
        yield


def kept_manifest(given: Dict[str, Any]) -> Any:
    """Return the stored manifest of a tree if it was made after the tree's completion, or None."""
    try:
        with open(_place(given), "rb") as file:
            made, _, data = file.read().partition(b"\n")
        return unpack_manifest(data) if made == making_id(given["mark"]) else None
    except (OSError, RefusedError):
        return None


def save_manifest(given: Dict[str, Any], manifest: bytes) -> None:
    """Store the manifest of a tree."""
    os.makedirs(given["manifests"], mode=0o700, exist_ok=True)
    place = _place(given)
    with open(place + ".new", "wb") as file:
        file.write(making_id(given["mark"]) + b"\n" + pack(manifest))
        file.flush()
        os.fsync(file.fileno())
    os.replace(place + ".new", place)


def _place(given: Dict[str, Any]) -> str:
    name = hashlib.sha256(os.fsencode(given["directory"])).hexdigest()[:24]
    return "%s/%s" % (given["manifests"], name)


def making_id(mark: str) -> bytes:
    """
    Return what identifies a description of one build of a tree: the manifest's schema, and the
    inode and the time of the tree's mark.
    """
    status = os.stat(mark)
    return b"%d %d %d" % (SCHEMA, status.st_ino, status.st_mtime_ns)


if __name__ == "__main__":
    main()
