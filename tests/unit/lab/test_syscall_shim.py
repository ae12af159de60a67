"""The library that answers system calls: compiled once, also when labs come up at the same time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab import syscall_shim


def test_builders_at_the_same_time_all_get_the_one_library_and_leave_nothing_else(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor(4) as pool:
        builders = [pool.submit(syscall_shim.build, tmp_path) for _ in range(4)]
        libraries = {each.result() for each in builders}
    assert list((tmp_path / "calls").iterdir()) == list(libraries)
