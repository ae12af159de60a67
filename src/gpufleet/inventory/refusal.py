"""Refuse a pyinfra run: every problem on its own line, no traceback.

pyinfra prints its own errors as one line that begins with the name of a gpufleet source file, which
is useless to operators. If an exception is both a pyinfra error and an error of pyinfra's command
line, pyinfra passes it on, and the exception prints itself.
"""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Any

import click
from pyinfra.api.exceptions import PyinfraError

# Importing pyinfra's command line applies gevent's patches to the whole process. Only the pyinfra
# command wants that, and only it must recognise this exception.
if TYPE_CHECKING or "pyinfra_cli" not in sys.modules:
    from click import ClickException as CliError
else:
    from pyinfra_cli.exceptions import CliError


class Refusal(PyinfraError, CliError):  # noqa: N818  # what it is, not what broke
    """
    End the run with exit code 1 and problems that the operator can correct.

    `problems` are whole sentences. `what` names the refused thing, for example
    `inventories/prod.py`.
    """

    def __init__(self, *problems: str, what: str = "this run") -> None:
        CliError.__init__(self, "\n".join(problems))
        self.problems: tuple[str, ...] = problems
        self.what = what

    def show(self, file: IO[Any] | None = None) -> None:
        """
        Print the refused thing and the problems. pyinfra calls this method at the end of the run.
        """
        many = f"{len(self.problems)} problems" if len(self.problems) > 1 else "1 problem"
        title = f"--> {self.what} is refused, {many}:"
        click.secho(title, file=file, err=True, fg="red", bold=True)
        for problem in self.problems:
            first, *rest = problem.splitlines()
            click.echo(
                "\n".join([f"    {first}", *(f"      {line}" for line in rest)]), file, err=True
            )
