"""A group of subcommands that are imported when they are called: `--help` costs next to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from umbp.kinds import nearest


class Subcommand(NamedTuple):
    """Where a subcommand is, and its line in the list."""

    module: str
    attribute: str
    summary: str


class LazyGroup(click.Group):
    """Knows its subcommands by name and summary, and imports the one that is called."""

    def __init__(self, *args: Any, subcommands: Mapping[str, Subcommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.subcommands = subcommands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.subcommands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = self.subcommands.get(cmd_name)
        if found is None:
            return None
        command = getattr(import_module(found.module), found.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{found.module}.{found.attribute} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.subcommands and not args[0].startswith("-") and not ctx.resilient_parsing:
            hint = nearest(args[0], self.subcommands) or f"; there are {', '.join(self.list_commands(ctx))}"
            ctx.fail(f"No such command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.subcommands[name].summary) for name in self.list_commands(ctx)])
