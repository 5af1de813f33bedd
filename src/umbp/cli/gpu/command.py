"""The command: pass, fail, or no GPU, each with an exit code of its own."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import click

import umbp

if TYPE_CHECKING:
    from umbp.cli.gpu.checks import Finding
    from umbp.cli.gpu.lab import Lab

PASSED, FAILED, NO_GPU = 0, 1, 3


@click.command("check-gpu")
@click.option("--device", default="cuda", help="The device, as torch names it.", show_default=True)
@click.option(
    "--mib",
    type=click.IntRange(min=1),
    default=512,
    help="What each measured copy moves.",
    show_default=True,
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def check_gpu(device: str, mib: int, as_json: bool) -> None:
    """Checks copies between a GPU and the pool: bytes, order beside a busy compute stream, GB/s.

    Needs torch for the GPU and this package. Exit code 0: all is right; 1: it is not; 2: an option is wrong;
    3: there is no GPU, so nothing was checked.
    """
    lab = _open(device, as_json)
    sys.exit(report(lab, _name_of(lab), mib << 20, as_json))


def report(lab: Lab, name: str, rate_bytes: int, as_json: bool) -> int:
    """Runs everything and prints it; the exit code."""
    from umbp.cli.gpu.checks import findings
    from umbp.cli.gpu.rates import rates

    start_s = time.monotonic()
    if not as_json:
        click.echo(f"umbp {umbp.__version__} on {name}")
        for engine, reason in lab.missing().items():
            click.echo(f"not checked: {engine} copies: {reason}")
    found = list(_told(findings(lab), as_json))
    rows = list(rates(lab, rate_bytes))
    bad = [each for each in found if each.problem]
    seconds = time.monotonic() - start_s
    if as_json:
        click.echo(_as_json(lab, name, found, rows, not bad))
    else:
        for row in rows:
            click.echo(
                f"{row['op']:5}  {row['engine']:6}  {row['ranges']:3} x {row['range_bytes']:6} bytes"
                f"  {row['gb_per_s']:7} GB/s  {row['ratio_to_memcpy']:5} of memcpy"
            )
        click.echo(_verdict(lab, found, bad, seconds))
    return FAILED if bad or not found else PASSED


def _told(found: Iterable[Finding], as_json: bool) -> Iterable[Finding]:
    """A line for each layout and engine, with what is wrong."""
    last, problems = ("", ""), [""]
    for each in found:
        if (each.layout, each.engine) != last:
            if last[0] and not as_json:
                click.echo(_line(last, problems))
            last, problems = (each.layout, each.engine), []
        problems += [f"{each.rule}: {each.problem}"] if each.problem else []
        yield each
    if last[0] and not as_json:
        click.echo(_line(last, problems))


def _line(which: tuple[str, str], problems: list[str]) -> str:
    layout, engine = which
    return f"{'FAIL' if problems else 'ok':4}  {engine:6}  {layout:34}  {'; '.join(problems)}".rstrip()


def _verdict(lab: Lab, found: list[Finding], bad: list[Finding], seconds: float) -> str:
    if bad or not found:
        return (
            f"FAIL: {len(bad)} of {len(found)} checks in {seconds:.0f} s. A report needs all of this output."
        )
    left = "".join(f"; {engine} copies were not checked" for engine in lab.missing())
    return f"PASS: {len(found)} checks in {seconds:.0f} s{left}."


def _as_json(lab: Lab, name: str, found: list[Finding], rows: list[Any], is_well: bool) -> str:
    checks = [
        {"rule": each.rule, "layout": each.layout, "engine": each.engine, "problem": each.problem}
        for each in found
    ]
    content = {
        "ok": is_well and bool(found),
        "device": name,
        "not_checked": lab.missing(),
        "checks": checks,
        "results": rows,
    }
    return json.dumps(content, indent=2)


def _open(device: str, as_json: bool) -> Lab:
    try:
        import torch
    except ImportError:
        _no_gpu("torch isn't installed", as_json)
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise click.BadParameter(
            f"torch knows no device {device!r}; write cuda, or cuda:1 for the second", param_hint="'--device'"
        ) from None
    try:
        module = torch.get_device_module(chosen)
        count = module.device_count() if chosen.type != "cpu" and module.is_available() else 0
        index: int = chosen.index if ":" in device else 0
    except RuntimeError as error:
        _no_gpu(str(error).partition("\n")[0], as_json)
    if count == 0:
        _no_gpu(f"torch {torch.__version__} sees no {chosen.type} device", as_json)
    if index >= count:
        _no_gpu(f"torch sees {count} devices, and none of index {index}", as_json)
    from umbp.cli.gpu.lab import GpuLab

    return GpuLab(torch.device(chosen.type, index))


def _no_gpu(reason: str, as_json: bool) -> NoReturn:
    text = f"No GPU here, nothing was checked: {reason}."
    click.echo(json.dumps({"ok": False, "device": None, "reason": text}) if as_json else text)
    sys.exit(NO_GPU)


def _name_of(lab: Lab) -> str:
    import torch

    module: Any = torch.get_device_module(lab.device)
    name = module.get_device_name(lab.device)
    kind = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}"
    return f"{name}, torch {torch.__version__}, {kind}, Linux {platform.release()}"
