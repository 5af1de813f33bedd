"""`umbp doctor`: this machine, this installation and, if given, a configuration, one line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from umbp.cli import checks, config_checks
from umbp.cli.checks import Check
from umbp.cli.hushed import hushed
from umbp.options import Options
from umbp.store.mooncake_master import METRICS_PORT

_COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}


@click.command()
@click.argument("kv_transfer_config", required=False)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    default=METRICS_PORT,
    show_default=True,
    help="Where a Mooncake master tells its figures.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def doctor(kv_transfer_config: str | None, metrics_port: int, as_json: bool) -> None:
    """Looks at this machine, this installation and, if given, a KV_TRANSFER_CONFIG.

    KV_TRANSFER_CONFIG is the JSON that `vllm serve --kv-transfer-config` takes, or a file with it.
    Exit code 1 when something is not as it should be.
    """
    config = None if kv_transfer_config is None else config_checks.read_transfer_config(kv_transfer_config)
    found: list[Check] = []
    for look in (
        checks.check_python,
        checks.check_native,
        checks.check_host,
        checks.check_plugin,
        checks.check_hash_seed,
    ):
        found.extend(look())
    options: Options | None = None
    if config is not None:
        more, options = config_checks.check_transfer_config(config)
        found.extend(more)
    if options is not None and options.pool is not None:
        found.extend(checks.check_shared_pool(options))
    else:
        found.extend(checks.check_memory(options))
    with ThreadPoolExecutor(1) as beside:
        # It takes seconds, so the store is asked meanwhile; and half a GiB, so memory was looked at before.
        of_vllm = beside.submit(lambda: list(checks.check_vllm()))
        if options is not None and options.mode == "distributed" and not _is_bad(found, "options"):
            found.extend(_check_store(options, metrics_port))
        if not as_json and checks.installed_vllm() is not None and not of_vllm.done():
            click.echo("Importing vLLM, which takes a while ...", err=True)
        found.extend(of_vllm.result())
    is_well = all(check.state != "bad" for check in found)
    click.echo(_as_json(found, options, is_well) if as_json else _as_table(found, options, is_well))
    sys.exit(0 if is_well else 1)


def _check_store(options: Options, metrics_port: int) -> list[Check]:
    """What a store's library says on its own goes into the table, and there only where something is bad."""
    from umbp.cli.store_checks import check_store
    from umbp.store.mooncake_client import first_error

    with hushed() as said:
        found = list(check_store(options, metrics_port))
        error = first_error(said()) if options.store == "mooncake" else ""
    if error and any(check.state == "bad" for check in found):
        found.append(Check("Mooncake's log", "note", error))
    return found


def _is_bad(found: list[Check], name: str) -> bool:
    return any(check.name == name and check.state == "bad" for check in found)


def _as_json(found: list[Check], options: Options | None, is_well: bool) -> str:
    rows = [{"name": each.name, "state": each.state, "text": each.text} for each in found]
    report: dict[str, Any] = {"ok": is_well, "checks": rows}
    if options is not None:
        # Of nested settings the names alone: reports get pasted, and passwords are kept there.
        report["options"] = {
            name: sorted(value) if isinstance(value, Mapping) else value
            for name, value in options.effective().items()
        }
    return json.dumps(report, indent=2)


def _as_table(found: list[Check], options: Options | None, is_well: bool) -> str:
    width = max(len(check.name) for check in found)
    lines = [
        f"{click.style(check.state.ljust(4), fg=_COLOURS[check.state])}  {check.name:{width}}  {check.text}"
        for check in found
        if check.name != "options" or check.state == "bad"
    ]
    if options is not None:
        lines += ["", "Effective options"]
        lines += [f"  {entry}" for entry in options.entries()]
    bad = sum(check.state == "bad" for check in found)
    lines += ["", "All is well." if is_well else f"Not as it should be: {bad} of {len(found)} checks."]
    return "\n".join(lines)
