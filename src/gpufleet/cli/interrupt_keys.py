"""Handle Ctrl-C while an upgrade runs. Import this module after `use_gevent()`: it loads gevent."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import click
import gevent

if TYPE_CHECKING:
    from gpufleet.upgrade.run.upgrade_journal import Journal


class InterruptKeys:
    """
    The Ctrl-C handler of an upgrade.

    After the first Ctrl-C, the upgrade finishes the groups in progress. The second one stops it at
    once.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._main = gevent.getcurrent()
        self._pressed = 0
        self._handler: Any = None

    def __enter__(self) -> InterruptKeys:
        self.install_handler()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore_handler()

    def install_handler(self) -> None:
        """Handle Ctrl-C in a separate greenlet, so that no journal write is interrupted."""
        self._handler = gevent.signal_handler(signal.SIGINT, self._interrupted)

    def restore_handler(self) -> None:
        """
        Restore Python's own handler, because no greenlet runs while the operator is asked a
        question.
        """
        if self._handler is not None:
            self._handler.cancel()
            self._handler = None
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupted(self) -> None:
        self._pressed += 1
        state = self._journal.state
        if self._pressed == 1 and state.wave and not state.paused:
            click.echo(
                "Interrupted: gpufleet finishes the current groups and starts no others. "
                "Press Ctrl-C again to stop now.",
                err=True,
            )
            self._journal.append("paused", why=["Ctrl-C"])
            return
        click.echo("Interrupted.", err=True)
        gevent.kill(self._main, KeyboardInterrupt)
