"""The state of wanted.py through gpufleet's converge."""

from benchmarks.converge_noop import wanted
from gpufleet.converge import Converge
from gpufleet.wanted import Directory, File, Group, Package, Unit, User, Wanted

node = Converge(
    Wanted(
        *(Package(name) for name in wanted.PACKAGES),
        Group(wanted.GROUP),
        User(wanted.USER, group=wanted.GROUP, home="/srv/bench"),
        *(Directory(path) for path in wanted.DIRECTORIES),
        *(File(path, content.encode()) for path, content in wanted.FILES.items()),
        *(Unit(name, enabled=None) for name in wanted.UNITS),
    )
)
node.packages(name="packages")
node.accounts(name="accounts")
node.files(name="files")
node.units(name="units")
