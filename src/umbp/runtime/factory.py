"""Mode to runtime: the built-in ones, imported when chosen, and plug-ins of the entry-point group
`umbp.runtimes`; `umbp.options.MODES` names them.

A plug-in's name is its mode; its value is a callable that takes the options and returns a runtime. A name
that is built in can't be taken by a plug-in.
"""

from __future__ import annotations

from collections.abc import Callable

from umbp.errors import ConfigError
from umbp.options import MODES, Options
from umbp.runtime.base import IUMBPRuntime, capabilities_of


def create_runtime(options: Options) -> IUMBPRuntime:
    """The runtime of `options.mode`; `ConfigError` of one sentence where there is none or it fails."""

    def made_by(make: Callable[[Options], IUMBPRuntime]) -> IUMBPRuntime:
        return make(options)

    return MODES.make(options.mode, made_by, _checked)


def _checked(runtime: object, who: str) -> IUMBPRuntime:
    if not isinstance(runtime, IUMBPRuntime):
        raise ConfigError(f"{who} returned a {type(runtime).__name__}, which can't make handles")
    capabilities_of(runtime)
    return runtime
