"""RUNS ON THE NODE: record the state of a unit's processes before they are killed.

Nothing may depend on a dump. A separate process writes it and is killed at its deadline. The files
that were written until then remain, so the most important files are written first.
    stall.json          the observations, the unit, and the unit's run
    metrics.txt         the last answer of /metrics
    processes/PID.txt   command line (with secrets hidden), status, number of open file descriptors
                        and sockets, and for each thread its place in the kernel (wchan, stack)
    processes/PID.python.txt   Python's stacks from py-spy, without local variables, because they
                        contain prompts
    gpus.txt            the processes of each GPU, from nvidia-smi
    journal.txt         the last lines of this run, with secrets hidden
The environment of a process is never read, because it contains keys. Directories have mode 0700 and
files mode 0600; root owns them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from typing import Any, Callable, List

from gpufleet.on_node.common import linux_facts, unit_journal
from gpufleet.on_node.common.answers import is_missing, read
from gpufleet.on_node.common.commands import run

SECONDS = 30
"""Deadline of a whole dump in seconds. The process that writes it is killed then."""
KEPT = 5
"""Maximum number of dumps of a stage. The oldest dump is removed first."""
FREE_BYTES = 1 << 30
"""Free space in bytes that is required to write a dump."""
FILE_BYTES = 4 << 20
PROCESSES = 64
THREADS = 512
STACKS_SECONDS = 4
ALL_STACKS_SECONDS = 12
GPUS_SECONDS = 3
JOURNAL_LINES = 2000
JOURNAL_SECONDS = 10
CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")
# The argument after a flag with such a name is a secret.
SECRET_FLAG = re.compile(r"(?i)^--?[\w-]*(?:key|token|secret|password)[\w-]*$")
SECRET_PAIR = re.compile(r"(?i)([\w-]*(?:key|token|secret|password)[\w-]*[=:])\S+")
# The same for members in JSON, also if the JSON is a string in other JSON. Numbers of tokens are
# not secrets.
SECRET_MEMBER = re.compile(
    r"""(?i)(?!["'][\w.-]*tokens["']\s*:\s*\d)"""
    r"""(["'][\w.-]*(?:key|token|secret|password)[\w.-]*\\*["']\s*:\s*)"""
    r"""(?:\\+"[^"\\]*\\+"|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\[[^]]*\]|[^\s,}\]]+)"""
)


def dump(folder: str, asked: dict[str, Any]) -> None:
    """
    Write a dump into a new folder.

    `asked` has `unit`, `life`, `group` (the unit's control group), `metrics` (bytes), `py_spy`
    (paths of programs, of which the first existing one is used) and `seen`, which is written
    unchanged.
    """
    os.makedirs(folder, mode=0o700)
    hide = unit_journal.secret_redactor(unit_journal.secrets(unit_journal.unit_text(asked["unit"])))
    write(folder, "stall.json", json.dumps(asked["seen"], indent=1, sort_keys=True) + "\n")
    write(folder, "metrics.txt", asked["metrics"].decode("utf-8", "replace"))
    pids = members(asked["group"])[:PROCESSES]
    os.mkdir(folder + "/processes", mode=0o700)
    for pid in pids:
        write(folder, "processes/%d.txt" % pid, hide(process(pid)))
    program = next(
        (path for path in asked["py_spy"] if os.access(linux_facts.ROOT + path, os.X_OK)), None
    )
    if program is None:
        write(folder, "processes/no-python-stacks.txt", "no py-spy: %s\n" % asked["py_spy"])
    else:
        until = time.monotonic() + ALL_STACKS_SECONDS
        for pid in pids:
            if is_python(pid) and time.monotonic() < until:
                write(
                    folder,
                    "processes/%d.python.txt" % pid,
                    hide(stacks(linux_facts.ROOT + program, pid)),
                )
    write(folder, "gpus.txt", text_or_reason(gpus))
    write(folder, "journal.txt", hide(text_or_reason(lines, asked["life"])))


def write(folder: str, name: str, text: str) -> None:
    """
    Write one file of a dump. If the text is too long, its beginning (the oldest part) is cut off.
    """
    content = text.encode("utf-8", "replace")
    if len(content) > FILE_BYTES:
        content = b"(cut)\n" + content[-FILE_BYTES:]
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open("%s/%s" % (folder, name), flags, 0o600), "wb") as file:
        file.write(content)


def members(group: str) -> List[int]:
    """
    Return the processes of a control group (for example `/system.slice/x`) and of the groups in it.
    """
    found: set[int] = set()
    for top in CGROUPS:
        for path, _, _ in os.walk(linux_facts.ROOT + top + group):
            file = path + "/cgroup.procs"
            with contextlib.suppress(OSError, ValueError), open(file, encoding="ascii") as lines:
                found.update(map(int, lines))
    return sorted(found - {0})


def process(pid: int) -> str:
    """Return the /proc entries of a process and its threads."""
    about = "/proc/%d" % pid
    texts = ["command: " + text_or_reason(command, pid)]
    texts.append("descriptors: " + text_or_reason(descriptors, pid))
    texts.append(text_or_reason(text_of, about + "/status"))
    try:
        threads = sorted(map(int, os.listdir(about + "/task")))
    except OSError as error:
        return "\n".join([*texts, str(error)]) + "\n"
    for thread in threads[:THREADS]:
        place = "%s/task/%d/" % (about, thread)
        texts.append("thread %d %s" % (thread, text_or_reason(text_of, place + "comm").strip()))
        texts.append("  state " + text_or_reason(state, place))
        texts.append("  wchan " + text_or_reason(text_of, place + "wchan"))
        stack = text_or_reason(text_of, place + "stack")
        texts += ["  kernel " + line for line in stack.splitlines()]
    return "\n".join(texts) + "\n"


def text_or_reason(function: Callable[..., str], *arguments: Any) -> str:
    """Call a function and return its text, or the reason why there is no text."""
    found = read(function, *arguments)
    return "(%s)" % json.dumps(found) if is_missing(found) else str(found)


def text_of(path: str) -> str:
    """Return a small file's text."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 16)


def state(place: str) -> str:
    """Return a thread's state. R: runs, S: sleeps, D: waits in the kernel, T: is stopped."""
    return text_of(place + "stat").rpartition(")")[2].split()[0]


def command(pid: int) -> str:
    """Return a process' command line without secrets."""
    return without_secrets(text_of("/proc/%d/cmdline" % pid).split("\0"))


def without_secrets(words: List[str]) -> str:
    """
    Return a command line's arguments without secrets.

    >>> without_secrets(["vllm", "serve", "--api-key", "abc", "--token=abc", "--port", "1"])
    'vllm serve --api-key <hidden> --token=<hidden> --port 1'
    >>> without_secrets(['{"token": "abc", "max_tokens": 5}'])
    '{"token": "<hidden>", "max_tokens": 5}'
    """
    found: List[str] = []
    hidden = False
    for word in words:
        follows = bool(SECRET_FLAG.match(word))
        found.append("<hidden>" if hidden and not word.startswith("--") else word)
        hidden = follows
    without = (SECRET_MEMBER.sub(r'\1"<hidden>"', word) for word in found)
    return " ".join(SECRET_PAIR.sub(r"\1<hidden>", word) for word in without).strip()


def descriptors(pid: int) -> str:
    """Return a process' number of open file descriptors, and how many of them are sockets."""
    place = "/proc/%d/fd" % pid
    names = os.listdir(place)
    sockets = 0
    for name in names:
        with contextlib.suppress(OSError):
            sockets += os.readlink("%s/%s" % (place, name)).startswith("socket:")
    return "%d, of which sockets: %d" % (len(names), sockets)


def is_python(pid: int) -> bool:
    """Return whether a process runs Python, judged by the name of its executable."""
    with contextlib.suppress(OSError):
        return "python" in os.path.basename(os.readlink("/proc/%d/exe" % pid))
    return False


def stacks(program: str, pid: int) -> str:
    """
    Return the Python stacks of a process.

    py-spy must not stop the process, for two reasons. For a process that was stopped already,
    py-spy 0.4.3 printed nothing in our tests. A process that hangs in the kernel would never stop.
    """
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=STACKS_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "%s\n" % error
    # The first line has the process' command. The others have functions, files and line numbers.
    first, newline, rest = done.stdout.decode("utf-8", "replace").partition("\n")
    return without_secrets(first.split(" ")) + newline + rest


def gpus() -> str:
    """Return the utilization of each GPU, and the processes that use it."""
    query = "--query-gpu=index,uuid,pstate,utilization.gpu,memory.used,ecc.errors.uncorrected."
    query += "volatile.total"
    held = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    answers = [
        run("nvidia-smi", each, "--format=csv", seconds=GPUS_SECONDS) for each in (query, held)
    ]
    return "\n".join(each.out + each.err for each in answers)


def lines(life: str) -> str:
    """Return the last lines of the journal for one run of a unit."""
    output = run(
        "journalctl", "--no-pager", "--quiet", "--output=short-iso-precise",
        "--lines=%d" % JOURNAL_LINES, "_SYSTEMD_INVOCATION_ID=" + life,
        seconds=JOURNAL_SECONDS,
    )  # fmt: skip
    return output.out + output.err


def folder(top: str, stage: str) -> str:
    """Return the folder for a new dump: `<top>/<stage>/<time, UTC>`."""
    return "%s/%s/%s" % (top, stage, time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime()))


def make_room(top: str, stage: str) -> str:
    """
    Remove a stage's oldest dumps, so that there is room for one more.

    Return "", or the reason if there is not enough space.
    """
    place = "%s/%s" % (top, stage)
    os.makedirs(place, mode=0o700, exist_ok=True)
    for name in sorted(os.listdir(place))[: -(KEPT - 1)]:
        shutil.rmtree("%s/%s" % (place, name), ignore_errors=True)
    about = os.statvfs(place)
    if about.f_bavail * about.f_frsize < FREE_BYTES:
        return "less than %d MiB are free below %s" % (FREE_BYTES >> 20, top)
    return ""
