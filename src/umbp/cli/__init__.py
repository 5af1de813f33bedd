"""The command `umbp`. A subcommand is imported when it is called."""

from __future__ import annotations

import errno
import os
import sys

import click

import umbp
from umbp.cli.lazy import LazyGroup, Subcommand
from umbp.errors import UMBPError

_SUBCOMMANDS = {
    "bench": Subcommand("umbp.cli.bench", "bench", "How fast the node pool is here, against references."),
    "check-gpu": Subcommand("umbp.cli.gpu", "check_gpu", "Are copies to and from a GPU right, and how fast?"),
    "demo": Subcommand("umbp.cli.demo", "demo", "A real engine forgets a long prompt and gets it back."),
    "doctor": Subcommand("umbp.cli.doctor", "doctor", "What this machine offers, and whether all is well."),
    "pool": Subcommand("umbp.cli.pool", "pool", "The pools that the engines of this node share."),
    "replay": Subcommand("umbp.cli.replay", "replay", "How large a pool pays, from a trace of requests."),
    "store": Subcommand("umbp.cli.store", "store", "What a cluster store needs beside the engines."),
}


@click.group(
    cls=LazyGroup, subcommands=_SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(umbp.__version__, prog_name="umbp")
def cli() -> None:
    """Keeps an LLM engine's KV cache alive beyond the engine."""


def main() -> None:
    """The entry point. An error of ours, or a full disk, ends as one sentence and exit code 2, never as a
    traceback.
    """
    try:
        cli(prog_name="umbp")
    except UMBPError as error:
        click.echo(f"umbp: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # The interpreter would try once more to write what is left, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
        what = error.filename or "the output"
        click.echo(f"umbp: {what} can't be written: {error.strerror}", err=True)
        sys.exit(2)
