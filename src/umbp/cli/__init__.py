"""The command `umbp`. A subcommand is imported when it is called: `umbp --help` costs next to nothing."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NamedTuple

import click

import umbp
from umbp.errors import UMBPError


class _Subcommand(NamedTuple):
    module: str
    attribute: str
    summary: str


_SUBCOMMANDS = {
    "demo": _Subcommand("umbp.cli.demo", "demo", "A real engine forgets a long prompt and gets it back."),
    "doctor": _Subcommand("umbp.cli.doctor", "doctor", "What this machine offers, and whether all is well."),
}


class _Subcommands(click.Group):
    """Knows the subcommands by name and summary, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = _SUBCOMMANDS.get(cmd_name)
        if found is None:
            return None
        command = getattr(import_module(found.module), found.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{found.module}.{found.attribute} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _SUBCOMMANDS[name].summary) for name in self.list_commands(ctx)])


@click.group(cls=_Subcommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(umbp.__version__, prog_name="umbp")
def cli() -> None:
    """Keeps an LLM engine's KV cache alive beyond the engine."""


def main() -> None:
    """The entry point. An error of ours ends as one sentence and exit code 2, never as a traceback."""
    try:
        cli(prog_name="umbp")
    except UMBPError as error:
        click.echo(f"umbp: {error}", err=True)
        sys.exit(2)
