"""
RUNS IN THE UNIT: starts the servers that share a GPU one after the other.

    vllm-gpu-turn FOLDER NAME URL SECONDS PROGRAM [ARGUMENT...]

vLLM measures the GPU's free memory while it starts. It counts memory that another process allocates
meanwhile as its own, and memory that one frees as available: the KV cache gets a wrong size, or the
start fails. So a server starts only while it holds the lock `FOLDER/turn` of its GPU. A helper
process holds the lock until the server answers at URL/health, ends, or SECONDS have passed, so that
no server waits for ever.

A server holds the lock `FOLDER/NAME.lives` as long as it lives. If a server ends while another one
starts, the starting one has measured memory that was freed meanwhile: it is ended, and systemd
restarts it.

Locks are flock(2) on files that are never removed: the kernel releases them when their process
ends, however that ends, and a boot begins without any.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from typing import List

POLL_SECONDS = 0.5
ANSWER_SECONDS = 5.0
END_SECONDS = 600
"""Seconds to wait at most for the end of a server that restarts: its drain, and a margin."""
LIVES = ".lives"
# The status that the unit does not restart after is 2: none of these is final.
FAILED = 1


def main(words: List[str]) -> int:
    """Wait for the turn, then become the program."""
    folder, name, url, seconds, *command = words
    os.makedirs(folder, mode=0o700, exist_ok=True)
    turn = opened(os.path.join(folder, "turn"))
    if not locks(turn, fcntl.LOCK_EX):
        holder = os.pread(turn, 256, 0).decode("utf-8", "replace") or "another server"
        say("waits until %s has started: the servers of a GPU start one after the other" % holder)
        fcntl.flock(turn, fcntl.LOCK_EX)
    os.ftruncate(turn, 0)
    os.pwrite(turn, name.encode(), 0)
    life = opened(os.path.join(folder, name + LIVES))
    if not locks(life, fcntl.LOCK_EX):
        say("another process of %s lives" % name)
        return FAILED
    server = Server(folder, name)
    others = " beside " + ", ".join(server.beside) if server.beside else ", alone on its GPU"
    say("starts" + others)
    # Twice: the server would not wait for a child that it does not know.
    child = os.fork()
    if not child:
        try:
            if not os.fork():
                os.close(life)
                server.watch(url, int(seconds))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(turn)
    os.set_inheritable(life, True)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        say("cannot start %s: %s" % (command[0], error.strerror))
    return FAILED


class Server:
    """A starting server: this process, after exec."""

    def __init__(self, folder: str, name: str) -> None:
        self.pid = os.getpid()
        self.folder = folder
        self.name = name
        self.beside = [each for each in names(folder) if each != name and holds_lock(folder, each)]
        """Other servers that run on the GPU when it starts."""

    def watch(self, url: str, seconds: int) -> None:
        """Return when the next server may start."""
        # Whatever a look hangs in, the kernel ends this process, and with it the turn.
        signal.alarm(seconds + 2 * int(ANSWER_SECONDS))
        until = time.monotonic() + seconds
        while holds_lock(self.folder, self.name):
            if answers(url):
                gone = [each for each in self.beside if not holds_lock(self.folder, each)]
                if gone:
                    self.again(gone)
                else:
                    say("answers: the next server of its GPU may start")
                return
            if time.monotonic() > until:
                late = "does not answer after %d s: the next server of its GPU may start"
                say(late % seconds)
                return
            time.sleep(POLL_SECONDS)

    def again(self, gone: List[str]) -> None:
        """End this server, which measured memory while others freed some, and wait for its end."""
        why = "%s ended while this server measured the GPU's free memory: it starts again"
        say(why % ", ".join(gone))
        signal.alarm(END_SECONDS)
        os.kill(self.pid, signal.SIGTERM)
        while holds_lock(self.folder, self.name):
            time.sleep(POLL_SECONDS)


def names(folder: str) -> List[str]:
    """Return the names of all servers that ever shared the GPU."""
    return sorted(each[: -len(LIVES)] for each in os.listdir(folder) if each.endswith(LIVES))


def holds_lock(folder: str, name: str) -> bool:
    """Return whether a server holds its lock."""
    file = opened(os.path.join(folder, name + LIVES))
    try:
        return not locks(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


def answers(url: str) -> bool:
    """Return whether a server is ready."""
    try:
        # A proxy of the environment is not asked for an address of this node.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url + "/health", timeout=ANSWER_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False


def opened(path: str) -> int:
    """Open a file, created if missing."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def locks(file: int, how: int) -> bool:
    """Take a lock without waiting; return False if another process has it."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def say(text: str) -> None:
    """Write a line for the unit's journal."""
    print("gpufleet: " + text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
