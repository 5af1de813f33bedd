"""The command itself: wires model, engine, measurement and report, and says what it is doing on standard
error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from umbp.cli.demo import engine as engines
from umbp.cli.demo import measure, model, report
from umbp.cli.demo.errors import DemoFailedError, NotInstalledError
from umbp.cli.demo.packages import require_packages
from umbp.cli.ending import termination_as_interrupt

EXIT_FAILED = 1
EXIT_UNAVAILABLE = 2
EXIT_INTERRUPTED = 130


@click.command("demo")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1, 20), help="Documents to measure."
)
@click.option(
    "--threads", type=click.IntRange(1), default=None, help="Engine threads [default: cores - 1, at most 4]."
)
def demo(is_json: bool, rounds: int, threads: int | None) -> None:
    """Show a prefix restored on a real engine.

    A real vLLM engine with a real model answers a question about a long document, loses the document to other
    prompts, and answers again from UMBP's pool. Exit code 1: something was not as it should be; 2: something
    is not installed.
    """
    status = Console(stderr=True, highlight=False)
    try:
        with termination_as_interrupt():
            problems = _run(status, is_json=is_json, rounds=rounds, threads=threads)
    except NotInstalledError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_UNAVAILABLE)
    except DemoFailedError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        click.echo("Stopped; no process and no half-made file is left.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        sys.exit(EXIT_FAILED)


def _run(status: Console, *, is_json: bool, rounds: int, threads: int | None) -> list[str]:
    require_packages()
    prepared = _prepare_model(status)
    log = model.cache_root() / "logs" / f"demo-engine-{os.getpid()}.log"
    with engines.EngineProcess(engines.engine_arguments(prepared.path), log, threads=threads) as engine:
        start_s = time.monotonic()
        status.print(
            "Starting vLLM on the model, with few KV blocks and UMBP's pool behind them (about 20 s)"
        )
        described = engine.start(lambda waited_s: status.print(f"Still starting, {waited_s:.0f} s"))
        status.print(f"The engine is up after {time.monotonic() - start_s:.0f} s")
        result = measure.measure(engine, rounds, status.print)
    used = report.versions(described, f"SmolLM2-135M-Instruct ({model.PACKAGE} {prepared.source_version})")
    if is_json:
        click.echo(json.dumps(report.as_json(result, used), indent=2))
    else:
        report.show(Console(), result, used)
    return result.problems()


def _prepare_model(status: Console) -> model.PreparedModel:
    with _progress(status) as show:
        prepared = model.prepare_model(show)
    status.print(f"The model is {'made' if prepared.is_new else 'ready'}: {prepared.path}", soft_wrap=True)
    return prepared


@contextlib.contextmanager
def _progress(status: Console) -> Iterator[model.Progress]:
    """Bars on a terminal; elsewhere a line for each step, since bars would leave blank lines there."""
    if not status.is_interactive:
        said: set[str] = set()

        def tell(what: str, done: int, total: int) -> None:
            if what not in said:
                said.add(what)
                status.print(f"Making the model: {what}", soft_wrap=True)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=status, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"Making the model: {what}", total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show
