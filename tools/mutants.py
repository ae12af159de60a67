"""Change one place of a room's code at a time, and check whether the room's tests fail.

    python -m tools.mutants             # list the rooms with their last results
    python -m tools.mutants planning

A room is a folder of src/gpufleet. A mutant is the room's code with one change by cosmic-ray: `<`
for `<=`, 4 for 3, `not` before a condition. A mutant is killed if a test of the room fails or the
tests take too long. Otherwise the mutant survives: a test is missing, or the change has no effect.
The tool makes the changes in a copy of the checkout, and writes the result to
docs/measured/mutants.md.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.support.checkout import ROOT
from tests.support.measured import RUN, cells_of, of_this_run, with_rows

REGISTER = ROOT / "docs/measured/mutants.md"
SOURCE = Path("src/gpufleet")
TESTS = Path("tests/unit")
EXAMPLES = TESTS / "test_doctests.py"
"""The test that runs the examples in docstrings."""
SURVIVORS = "| room | place | survives | why |"
SAMPLE = 400
"""The number of mutants of all rooms together."""
LEAST = 8
"""The minimum number of mutants of a room."""
SEED = 4711
SLOWEST = 4.0
"""Maximum time of a mutant's tests, as a multiple of the time for the unchanged code."""
PATIENCE = 60.0
"""Seconds that a mutant's tests may always take, even if `SLOWEST` allows less."""
PASSED = (0, 5)
"""pytest's exit statuses: all passed, and no test of the kind."""
QUICK, SLOW = "not lab and not slow and not long", "slow and not lab and not long"
"""pytest's marker expressions for two kinds of tests."""

# One half of a sample is chosen from these kinds in turn. The values are the first letters of the
# operators' names.
DIRECTED = {
    "comparison": ("ReplaceComparison",),
    "constant": ("NumberReplacer", "ReplaceTrue", "ReplaceFalse"),
    "branch": ("AddNot", "ReplaceAnd", "ReplaceOr", "ReplaceUnaryOperator_Delete_Not"),
}
# Identity for equality, and for an order: nothing notices the one, and nothing can miss the other.
# The last two need to be told names.
LEFT_OUT = re.compile(
    r"ReplaceComparisonOperator_((?!Is)\w+_(Is|IsNot)|(Is|IsNot)_(?!Is)\w+)|Variable\w+"
)


@dataclass(frozen=True)
class Mutant:
    """One change: its place, and the changed file."""

    file: str
    """Below src/gpufleet."""
    line: int
    scope: str
    """The function or class; empty: the module."""
    change: str
    """The line before and after the change."""
    code: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the mutant's identity, which does not change if other lines of the file move."""
        return self.file, self.scope, self.change

    @property
    def place(self) -> str:
        """Return the place of the change as text."""
        return f"{self.file}:{self.line}" + (f" `{self.scope}`" if self.scope else "")


@dataclass(frozen=True)
class Position:
    """A place that operators of one group can change."""

    file: str
    line: int
    occurrence: int
    operators: tuple[str, ...]
    rank: str

    @property
    def kind(self) -> str:
        """Return the kind of DIRECTED that it belongs to; empty: another."""
        name = self.operators[0]
        return next((kind for kind, names in DIRECTED.items() if name.startswith(names)), "")


def rooms(root: Path = ROOT) -> list[str]:
    """Return the rooms, by name."""
    return sorted(path.parent.name for path in (root / SOURCE).glob("*/__init__.py"))


def shares(sizes: Mapping[str, int], total: int = SAMPLE) -> dict[str, int]:
    """Return the number of mutants of each room: LEAST, and a share by lines of code."""
    lines, spare = sum(sizes.values()), total - LEAST * len(sizes)
    exact = {room: spare * size / lines for room, size in sizes.items()}
    counts = {room: LEAST + int(share) for room, share in exact.items()}
    by_rest = sorted(exact, key=lambda room: (int(exact[room]) - exact[room], room))
    for room in by_rest[: total - sum(counts.values())]:
        counts[room] += 1
    return counts


def share_of(room: str, root: Path = ROOT) -> int:
    """Return the number of mutants of this room."""
    sizes = {
        name: sum(
            len(path.read_text().splitlines()) for path in (root / SOURCE / name).rglob("*.py")
        )
        for name in rooms(root)
    }
    return shares(sizes)[room]


@cache
def operator_groups() -> tuple[tuple[str, ...], ...]:
    """Return the operators' names, without `core/`: in one group those that change the same
    places."""
    groups = defaultdict(list)
    for name in (name.removeprefix("core/") for name in operator_names()):
        if not LEFT_OUT.fullmatch(name):
            replaced = re.fullmatch(r"(Replace\w+Operator_(?!Delete)\w+?)_\w+", name)
            groups[replaced[1] if replaced else name].append(name)
    return tuple(map(tuple, groups.values()))


def positions(file: str, text: str) -> Iterator[Position]:
    """Yield every place of a file that an operator can change."""
    representatives = [(get_operator(f"core/{g[0]}")(), g) for g in operator_groups()]
    counts: Counter[tuple[str, ...]] = Counter()
    same: Counter[tuple[object, ...]] = Counter()
    lines, scopes = text.splitlines(), scopes_of(text)
    for node in ast_nodes(get_ast(text)):
        for operator, names in representatives:
            for (line, column), _ in operator.mutation_positions(node):
                stripped = lines[line - 1].lstrip()
                # The line number is not used, so that a change elsewhere in the file does not
                # change the sample.
                where = (
                    file,
                    scopes[line],
                    stripped,
                    column - len(lines[line - 1]) + len(stripped),
                )
                rank = digest(*where, names[0], same[where, names])
                same[where, names] += 1
                yield Position(file, line, counts[names], names, rank)
                counts[names] += 1


def digest(*what: object) -> str:
    """Return what stands for a random number."""
    return hashlib.sha256(repr((SEED, *what)).encode()).hexdigest()


def scopes_of(text: str) -> dict[int, str]:
    """Return the innermost function or class of each line that has one."""
    scopes: dict[int, str] = defaultdict(str)
    for node in ast.walk(ast.parse(text)):  # outer ones first
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                scopes[line] = node.name
    return scopes


def sample(files: Mapping[str, str], count: int) -> list[Mutant]:
    """
    Return `count` mutants of these files, the same ones for the same code.

    One half are comparisons, constants and branches in turn. The other half are changes of any
    kind. No line is changed twice, and annotations, which are not executed, are not changed.
    """
    found = [position for file in sorted(files) for position in positions(file, files[file])]
    ranked = sorted(found, key=lambda position: position.rank)
    taken: set[tuple[str, int]] = set()

    def draw(kinds: Sequence[str]) -> Iterator[Mutant]:
        for position in ranked:
            place = (position.file, position.line)
            if place not in taken and (not kinds or position.kind in kinds):
                taken.add(place)
                mutant = mutant_at(position, files[position.file])
                if mutant:
                    yield mutant

    kinds = [draw([kind]) for kind in DIRECTED]
    directed = chain.from_iterable(zip(*kinds, strict=False))
    chosen = list(islice(directed, count // 2))
    return [*chosen, *islice(draw(()), count - len(chosen))]


def mutant_at(position: Position, text: str) -> Mutant | None:
    """Return the change at this place; None if it changes nothing that runs."""
    name = min(position.operators, key=lambda operator: digest(position.rank, operator))
    code = mutate_code(text, get_operator(f"core/{name}")(), position.occurrence)
    if code is None or not runs_otherwise(text, code):
        return None
    before, after = text.splitlines(), code.splitlines()
    new = "gone"
    if name != "RemoveDecorator":
        new = after[position.line - 1 - len(before) + len(after)]
    change = " → ".join(" ".join(line.split()) for line in (before[position.line - 1], new))
    return Mutant(position.file, position.line, scopes_of(text)[position.line], change, code)


def runs_otherwise(before: str, after: str) -> bool:
    """Return whether two texts are different code; a text that cannot be parsed is different."""
    try:
        return bare(before) != bare(after)
    except SyntaxError:
        return False


def bare(text: str) -> str:
    """Return the code without annotations."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return ast.dump(tree)


def suite(room: str, file: str, root: Path) -> tuple[list[str], list[str], list[str]]:
    """
    Return three lists of test files: those that name the module of this file, the other files of
    the room, and the files whose slow tests run too.

    The first list probably kills a mutant, and then the others need not run. It includes the tests
    of other rooms that import the module. The tests of a program in on_node/flags may be in the
    room `flags`, which runs it. A module's examples are in its docstrings. The slow tests are those
    of the first list, and of the folder that mirrors the module's folder.
    """
    folders = {root / TESTS / name for name in (room, *Path(file).parent.parts[1:])}
    inside = sorted(path for each in folders for path in each.rglob("test_*.py"))
    folder, stem = ".".join(Path("gpufleet", file).parent.parts), re.escape(Path(file).stem)
    texts = {path: path.read_text() for path in sorted((root / TESTS).rglob("test_*.py"))}
    named = [path for path, text in texts.items() if re.search(rf"\b{stem}\b", text)]
    imported = re.compile(
        rf"(?m)^from {re.escape(folder)}(\.{stem} import | import (\(\n[^)]*|.*)\b{stem}\b)"
    )
    inside += [path for path in named if imported.search(texts[path]) and path not in inside]
    inside.sort(key=lambda path: path.stem != f"test_{Path(file).stem}")
    near, others = (
        [str(path.relative_to(root)) for path in inside if (path in named) is wanted]
        for wanted in (True, False)
    )
    own = str(TESTS / Path(file).parent)
    slow = [*near, *(path for path in others if str(Path(path).parent) == own)]
    if "\n    >>> " in (root / SOURCE / file).read_text():
        others.append(str(EXAMPLES))
    return near, others, slow


def copy_checkout(to: Path) -> None:
    """Copy the files of the checkout, without what git ignores."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def run_tests(
    root: Path, tests: Iterable[str], seconds: float, kind: str = QUICK
) -> tuple[str, str]:
    """Return whether the tests of a kind in the copy at `root` "passed", "failed" or took "too
    long", and what pytest printed."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    with TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [*pytest, "-m", kind, *tests],
            cwd=root,
            env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            result = "passed" if process.wait(seconds) in PASSED else "failed"
        except subprocess.TimeoutExpired:
            result = "too long"
        finally:
            end(process)
        output.seek(0)
        return result, output.read()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group; the first signal lets fixtures end what they started."""
    for number, seconds in ((signal.SIGINT, 10), (signal.SIGKILL, 30)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(seconds)


def survivors_of(root: Path, room: str, mutants: Iterable[Mutant], seconds: float) -> list[Mutant]:
    """
    Try each mutant in the copy at `root`, and return those that no test of the room noticed.

    Slow tests run only if no quick test noticed the mutant.
    """
    left = []
    for number, mutant in enumerate(mutants, 1):
        file = root / SOURCE / mutant.file
        unchanged = file.read_bytes()
        try:
            file.write_text(mutant.code)
            # Python compares only the second and the size to decide whether compiled code is
            # current.
            os.utime(file, (time.time(), 1e9 + number))
            result = "passed"
            near, others, slow = suite(room, mutant.file, root)
            for tests, kind in ((near, QUICK), (others, QUICK), (slow, SLOW)):
                if tests and result == "passed":
                    result, _ = run_tests(root, tests, seconds, kind)
        finally:
            file.write_bytes(unchanged)
            os.utime(file, (time.time(), 1e9))
        said = {"passed": "SURVIVES", "failed": "killed"}.get(result, result)
        print(f"{said:8} {mutant.place} {mutant.change}", flush=True)
        if result == "passed":
            left.append(mutant)
    return left


def with_result(page: str, row: Sequence[str], survivors: Iterable[Mutant]) -> str:
    """
    Return the page with a room's result: room, mutants, killed, tests, minutes, run.

    The number of mutants that the first run killed stays, and also the reasons that a person wrote
    beside survivors.
    """
    room, mutants, killed, *rest = row
    lines = page.splitlines()
    first = next((cells_of(line)[2] for line in lines if line.startswith(f"| {room} | ")), killed)
    page = with_rows(page, [[room, mutants, first, killed, *rest]], key=1)
    head, found, tail = page.partition(f"{SURVIVORS}\n")
    if not found:
        raise ValueError(f"no table `{SURVIVORS}` in the page of mutants")
    rule, *table = tail.splitlines()
    end_of_table = next(
        (at for at, line in enumerate(table) if not line.startswith("|")), len(table)
    )
    rows = [cells_of(line) for line in table[:end_of_table]]
    reasons = {identity(row[1], row[2]): row[3] for row in rows if row[0] == room}
    new = [
        [room, mutant.place, f"`{escaped(mutant.change)}`", ""]
        for mutant in sorted(survivors, key=lambda mutant: (mutant.file, mutant.line))
    ]
    for cells in new:
        cells[3] = reasons.get(identity(cells[1], cells[2]), "")
    kept = sorted([*(row for row in rows if row[0] != room), *new], key=lambda row: row[0])
    written = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in kept]
    return "\n".join([head + SURVIVORS, rule, *written, *table[end_of_table:]]) + "\n"


def identity(place: str, change: str) -> tuple[str, str]:
    """Return a survivor's identity, which moved lines do not change."""
    return re.sub(r":\d+", "", place), change


def escaped(text: str) -> str:
    """Return text for a table's cell in back quotes."""
    return text.replace("`", "'").replace("|", "¦")


def listing(register: str) -> str:
    """Return a line for each room with its last result."""
    rows = [cells_of(line) for line in register.splitlines() if line.startswith("| ")]
    known = {row[0]: row for row in rows if len(row) == 7 and row[-1] != RUN}
    last = {room: f"{row[3]} of {row[1]} killed; {row[-1]}" for room, row in known.items()}
    return "\n".join(f"{room:14} {last.get(room, 'never run')}" for room in rooms())


def run(room: str) -> int:
    """Try a room's mutants, write its row, and return 0 unless the tests fail by themselves."""
    begin = time.monotonic()
    with TemporaryDirectory(prefix="gpufleet-mutants-") as folder:
        root = Path(folder)
        copy_checkout(root)
        paths = sorted((root / SOURCE / room).rglob("*.py"))
        files = {str(path.relative_to(root / SOURCE)): path.read_text() for path in paths}
        mutants = sample(files, share_of(room, root))
        suites = [suite(room, mutant.file, root) for mutant in mutants]
        started, number = time.monotonic(), 0
        for files_of, kind in (
            ({test for near, others, _ in suites for test in (*near, *others)}, QUICK),
            ({test for *_, slow in suites for test in slow}, SLOW),
        ):
            result, output = run_tests(root, sorted(files_of), 3600, kind)
            number += int(found[1]) if (found := re.search(r"(\d+) passed", output)) else 0
            if result != "passed":
                break
        if result != "passed" or not number:
            print(f"{output}\nThe tests of {room} fail without a change: repair them first.")
            return 1
        seconds = max(PATIENCE, SLOWEST * (time.monotonic() - started))
        left = survivors_of(root, room, mutants, seconds)
    minutes = f"{(time.monotonic() - begin) / 60:.0f}"
    killed = len(mutants) - len(left)
    row = [room, str(len(mutants)), str(killed), str(number), minutes, of_this_run()]
    REGISTER.write_text(with_result(REGISTER.read_text(), row, left))
    print(f"{room}: {killed} of {len(mutants)} killed in {minutes} min")
    return 0


def main(arguments: Sequence[str]) -> int:
    """List the rooms, or try the mutants of the room in the arguments."""
    if not arguments:
        print(listing(REGISTER.read_text()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # take the copy away
    if len(arguments) > 1 or arguments[0] not in rooms():
        print(f"{' '.join(arguments)} is not a room. The rooms:\n{listing(REGISTER.read_text())}")
        return 2
    return run(arguments[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
