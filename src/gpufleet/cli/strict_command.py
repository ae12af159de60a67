"""The base class of commands that refuse repeated options. The module imports no slow modules."""

from __future__ import annotations

from collections import Counter

import click


class StrictCommand(click.Command):
    """
    A command that refuses an option that is repeated, although it has only one value.

    Without this class, click would use the last value and print nothing.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """
        Raise a `UsageError` if an option with one value is repeated. Then parse the arguments.
        """
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(list(args))
            for param, times in Counter(order).items():
                if isinstance(param, click.Option) and times > 1 and _takes_one_value(param):
                    name = max(param.opts, key=len)
                    raise click.UsageError(
                        f"{name} is given {times} times: write {name} only once", ctx
                    )
        return super().parse_args(ctx, args)


def _takes_one_value(option: click.Option) -> bool:
    return not (option.is_flag or option.multiple or option.count)
