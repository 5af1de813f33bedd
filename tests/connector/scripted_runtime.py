"""The plug-in of mode "scripted": a runtime that a test made and both halves of one engine share.

A test puts its runtime on the table under a name and gives that name in `plugin_options`.
"""

from __future__ import annotations

from umbp.options import Options
from umbp.runtime.base import IUMBPRuntime
from umbp.testing.runtimes import CountingRuntime, PickyRuntime, PromptRuntime, WatchedRuntime, plain, slowly

__all__ = [
    "MODE",
    "TABLE",
    "CountingRuntime",
    "PickyRuntime",
    "PromptRuntime",
    "WatchedRuntime",
    "make",
    "plain",
    "slowly",
]

MODE = "scripted"
TABLE: dict[str, IUMBPRuntime] = {}


def make(options: Options) -> IUMBPRuntime:
    return TABLE[str(options.plugin_options["runtime"])]
