"""Find the lines of a shell script that start a server, without running the script.  Pure.

Contract: words, quotes, continued lines, comments, here-documents and the script's variables are
read as a shell reads them. `ExecStart=` and `Environment=` of a unit file are read like lines of a
script. Values that are known only when the script runs (`$(...)`, variables from outside the
script) are not guessed and stay unchanged.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpufleet.errors import FleetError
from gpufleet.importer import bash_arrays, container
from gpufleet.importer.other_engines import as_launch, find_engine
from gpufleet.importer.script_lines import read_lines
from gpufleet.importer.server import Launch, Note

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?[-=])([^}]*))?\}|([A-Za-z_]\w*))")
_OWN = "\0"
"""The prefix of a shell operator. It is needed because a quoted word may look like an operator."""
_ENDS = {_OWN + end for end in ("|", "||", "&&", ";", ";;", "&", "|&", "(", ")")}
# Quoted texts, computed texts and arrays are not split. `2>&1` and `&>log` do not end a command.
_OPERATOR = re.compile(
    r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|[$=]\((?:[^()]|\([^()]*\))*\)|`[^`]*`"""
    r"""|<\((?:[^()]|\([^()]*\))*\)"""
    r"""|(?P<to>(?:(?<!\S)\d+)?(?:&>>?|>>?[&|]?|<<<|<<-?|<[&>]?))"""
    r"""|(?P<end>&&?|\|[|&]?|;;?|[()])""",
    re.DOTALL,
)
_HELD = "\x1f"
"""Replaces a blank in a shell expansion, so that the expansion stays one word."""
_REDIRECTION = re.compile(rf"{_OWN}\d*[<>&|-]+(.*)", re.DOTALL)
_OLD_ENTRY = re.compile(r"vllm\.entrypoints\.(?:openai\.api_server|api_server|cli\.main)$")
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_CONTAINERS = {"docker", "podman", "nerdctl"}
_REST = {"$@", "$*", "${@}", "${*}"}
_COMPUTED = re.compile(r"\$\(|`|\$[0-9@*#?]")
_INNER = {"-c", "-lc", "-ec", "-cl"}
# Commands that mention a server, but do not start it.
_TALK = {"echo", "printf", "grep", "pgrep", "pkill", "which", "type", "cat", "man"}
_MOST_EXPANDED = 1 << 22  # limit of characters of all expanded variables of a source


@dataclass
class Expansion:
    """
    Limits how much text the variables of a source expand to.

    Without a limit, four variables that contain each other many times can fill a machine's memory.
    """

    characters: int = 0

    def add(self, text: str) -> str:
        """
        Return the value of a variable. Raises `FleetError` if all values together are too long.
        """
        self.characters += len(text)
        if self.characters > _MOST_EXPANDED:
            raise FleetError(
                f"the variables of the script expand to more than {_MOST_EXPANDED:,} "
                "characters: write the values where they are used"
            )
        return text


@dataclass
class _Script:
    """The variables and arrays that the lines of a script have set so far."""

    variables: dict[str, str] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    expanded: Expansion = field(default_factory=Expansion)

    def expand(self, text: str) -> str:
        """Return a text after known variables are replaced by their values."""
        return expand(text, self.variables, self.expanded.add)


def launches(text: str, name: str) -> tuple[Launch, ...]:
    """
    Return the servers that a script starts, in order.

    `name` is for a server that has no name in the script. Raises `FleetError` if a quote is not
    closed.
    """
    return _launches(text, name, _Script())


def _launches(text: str, name: str, script: _Script) -> tuple[Launch, ...]:
    found: list[Launch] = []
    for words, notes in _commands(bash_arrays.one_line_each(text)):
        started = _command(words, script, name)
        found += (replace(each, notes=(*each.notes, *notes)) for each in started)
        if words and found and words[0].startswith("-"):
            left = (*found[-1].left_behind, *map(script.expand, words))
            found[-1] = replace(found[-1], left_behind=left)
    return tuple(found)


def expand(
    text: str, variables: Mapping[str, str], add: Callable[[str], str] = lambda value: value
) -> str:
    """
    Return a text after known variables are replaced. Other variables stay unchanged.

    `add` is called with the value of each variable. It may raise `FleetError` if the values are too
    long.

    >>> expand("$A/${B:-c}/$D", {"A": "a"})
    'a/c/$D'
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        if name in variables:
            return add(variables[name])
        return match[3] if match[2] else match[0]

    return _VARIABLE.sub(value, text)


# -- a script as commands --------------------------------------------------------------------------


def _commands(text: str) -> Iterator[tuple[list[str], tuple[Note, ...]]]:
    """Yield the words of each simple command, with notes about its lines."""
    for line, notes in read_lines(text):
        words: list[str] = []
        for word in _words(line):
            if word in _ENDS:
                yield words, notes
                words = []
            else:
                words.append(word)
        yield words, notes


def _words(line: str) -> list[str]:
    """Return the words of a line. An expression that the shell computes is always one word."""
    return [word.replace(_HELD, " ") for word in shlex.split(_space_out(line))]


def _space_out(line: str) -> str:
    """Return a line in which each operator is a separate word with the prefix `_OWN`."""

    def spaced(match: re.Match[str]) -> str:
        if match["end"]:
            return f" {_OWN}{match[0]} "
        if match["to"]:
            return f" {_OWN}{match[0]}"
        computed = match[0].startswith(("$(", "`", "<("))
        return re.sub(r"\s", _HELD, match[0]) if computed else match[0]

    return _OPERATOR.sub(spaced, line)


# -- one command -----------------------------------------------------------------------------------


def _command(words: Sequence[str], script: _Script, name: str) -> tuple[Launch, ...]:
    """Return the servers that a command starts. If it sets variables, store them in `script`."""
    if words[:1] == [bash_arrays.SET]:
        _set_array(words, script)
        return ()
    words = bash_arrays.fill_in(words, script.arrays)
    if words and words[0] in _SETTING:
        _set(words, script)
        return ()
    before, rest = _assignments(words, script)
    if not rest:
        script.variables |= {k: v for k, v in before.items() if not _COMPUTED.search(v)}
        return ()
    if rest[0].rpartition("/")[2] in _TALK:
        return ()
    if _start(rest) is None:
        return _within(rest, replace(script, exported={**script.exported, **before}), name)
    rest, passed, notes = _read(rest, script)
    start = _start(rest)
    if start is None or {"-h", "--help"} & set(rest[start[1] :]):
        return ()
    first, behind = start
    if rest[first].rpartition("/")[2] in _CONTAINERS:
        launch = container.from_run(rest[behind:], name, first_launch)
    else:
        inner = (_ASSIGNMENT.fullmatch(word) for word in rest[:first])  # env A=b vllm serve ...
        before |= {match[1]: match[2] for match in inner if match}
        argv, environment = tuple(rest[behind:]), {**script.exported, **before}
        other = find_engine(rest)
        launch = (
            as_launch(other[2], name, argv, environment)
            if other
            else Launch(name, argv, environment)
        )
    notes = [*_front(rest[:first]), *notes]
    if passed:
        text = (
            f"a shell replaces `{passed}` with the arguments of the script: write these "
            "arguments in its place"
        )
        notes.append(Note(text, decide=True))
    return (replace(launch, notes=(*launch.notes, *notes)),)


_KEYWORDS = {"!", "(", "{", "do", "elif", "else", "if", "then", "time", "until", "while"}


def _front(words: Sequence[str]) -> Iterator[Note]:
    """
    Yield notes about words before a server's command, such as `sudo -u vllm` or `nohup`.

    The notes show programs and options. They do not show values, because a value may be a secret,
    as in `srun --export=HF_TOKEN=...`.
    """
    own = [word for word in words if not _ASSIGNMENT.fullmatch(word)]
    if "do" in own:
        yield Note(
            "the server runs in a shell loop, but gpufleet writes only one entry: write an "
            "entry for each model, or set `replicas`",
            decide=True,
        )
    own = [word for word in own if word not in _KEYWORDS]
    if own and _PYTHON.fullmatch(own[-1]):
        own.pop()
    if own:
        options = (word.partition("=")[0] for word in own[1:] if word.startswith("-"))
        shown = " ".join((own[0], *options))
        yield Note(
            f"`{shown}` before the command is dropped, because systemd starts a server as the "
            "user `vllm.user`"
        )


def _within(words: Sequence[str], script: _Script, name: str) -> tuple[Launch, ...]:
    """
    Return the servers that a command inside another command starts.

    Examples of such commands are `bash -c "..."` and `ssh node "..."`.
    """
    program = words[0].rpartition("/")[2]
    remote = program in {"ssh", "tmux", "screen", "su"}
    for at, word in enumerate(words):
        quoted = words[at - 1] in _INNER if at else False
        if (quoted or (remote and " " in word)) and container.starts_server([word]):
            found = _launches(word, name, script)
            if program != "ssh" or at < 2:
                return found
            host = Note(
                f"`ssh {words[at - 1]}` before the command is dropped: write the entry for "
                "a group that contains only this node",
                decide=True,
            )
            return tuple(replace(each, notes=(host, *each.notes)) for each in found)
    return ()


def first_launch(text: str) -> Launch | None:
    """Return the first server that a command line for a container's shell starts, or None."""
    return next(iter(launches(text, "")), None)


_SETTING = {"export", "declare", "typeset", "local", "readonly"}


def _set(words: Sequence[str], script: _Script) -> None:
    """Set variables of the script, as the words of `export` or a similar builtin do."""
    for word in words[1:]:
        name = word.partition("=")[0]
        if match := _ASSIGNMENT.fullmatch(word):
            script.variables[name] = script.expand(match[2])
        if words[0] == "export" and name in script.variables:
            script.exported[name] = script.variables[name]


def _set_array(words: Sequence[str], script: _Script) -> None:
    """Set an array or add words to it. The words are a line that `bash_arrays` has written."""
    _, name, how, *given = words
    before = script.arrays.get(name, []) if how == "+" else []
    filled = [script.expand(word) for word in bash_arrays.fill_in(given, script.arrays)]
    script.expanded.add("".join(before))
    script.arrays[name] = before + filled


def _assignments(words: Sequence[str], script: _Script) -> tuple[dict[str, str], list[str]]:
    """Return the variables that are set in front of a command, and the command itself."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        found[match[1]] = script.expand(match[2])
        rest.pop(0)
    return found, rest


def _read(words: Sequence[str], script: _Script) -> tuple[list[str], str, list[Note]]:
    """
    Return the words that the server gets, the word for the script's own arguments, and notes.

    The second result is for example `$@`, or "". The notes are about dropped words.
    """
    found: list[str] = []
    notes: list[Note] = []
    passed = ""
    skip = False
    for at, word in enumerate(words):
        if skip:
            skip = False
            continue
        if match := _REDIRECTION.fullmatch(word):
            skip = not match[1]
            said = " ".join(words[at : at + 2] if skip else [word]).removeprefix(_OWN)
            said = "<" if said.lstrip("0123456789").startswith("<") else said  # may be a secret
            notes.append(
                Note(f"`{said}` is dropped, because the output of a server is in the journal")
            )
            continue
        if word in _REST:
            passed = word
            continue
        whole = _VARIABLE.fullmatch(word)
        text = script.expand(word)
        # An unquoted variable may contain several words. A model's name never contains a space.
        if whole and text != word and not text:
            continue
        if whole and text != word and " " in text and not text.lstrip().startswith(("{", "[")):
            found += shlex.split(text)
        else:
            found.append(text)
    return found, passed, notes


def _start(words: Sequence[str]) -> tuple[int, int] | None:
    """Return the index of a server's command and the index of its first argument, or None."""
    for at, word in enumerate(words):
        command = word.rpartition("/")[2]
        following = words[at + 1] if at + 1 < len(words) else ""
        if command == "vllm" and following == "serve":
            return at, at + 2
        if command in _CONTAINERS:
            rest = list(words[at + 1 :])
            if "run" in rest[:2] and container.starts_server(rest):
                return at, at + 2 + rest.index("run")
            return None
        if word == "-m" and _OLD_ENTRY.match(following):
            behind = at + 2
            if following.endswith("cli.main") and words[behind : behind + 1] == ["serve"]:
                behind += 1
            return at, behind
    other = find_engine(words)
    return other[:2] if other else None
