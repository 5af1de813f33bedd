"""Mode to runtime: the built-in ones, imported when chosen, and plug-ins of the entry-point group
`umbp.runtimes`.

A plug-in's name is its mode; its value is a callable that takes the options and returns a runtime. A name
that is built in can't be taken by a plug-in.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from umbp.errors import ConfigError, UMBPError
from umbp.kinds import nearest, shown
from umbp.options import BUILT_IN_MODES, Options
from umbp.runtime.base import IUMBPRuntime, capabilities_of

GROUP = "umbp.runtimes"

BUILT_IN = {
    "embedded": ("umbp.runtime.embedded", "EmbeddedRuntime"),
    "standalone": ("umbp.runtime.standalone", "StandaloneRuntime"),
    "distributed": ("umbp.runtime.distributed", "DistributedRuntime"),
}
"""The built-in modes, by module and class."""


def create_runtime(options: Options) -> IUMBPRuntime:
    """The runtime of `options.mode`; `ConfigError` of one sentence where there is none or it fails."""
    mode = options.mode
    if mode in BUILT_IN:
        module, name = BUILT_IN[mode]
        runtime: IUMBPRuntime = getattr(import_module(module), name)(options)
        return runtime
    return _made_by_plug_in(_plug_in(mode), options)


def plug_in_modes() -> list[str]:
    """The modes that installed plug-ins add, sorted; one that takes a built-in name is not among them."""
    return sorted({point.name for point in entry_points(group=GROUP)} - set(BUILT_IN_MODES))


def _plug_in(mode: str) -> EntryPoint:
    points = tuple(entry_points(group=GROUP, name=mode))
    if not points:
        known = [*BUILT_IN, *plug_in_modes()]
        hint = nearest(mode, known) or ";"
        raise ConfigError(f"unknown mode {shown(mode)}{hint} known here: {', '.join(known)}")
    if len({point.value for point in points}) > 1:
        origins = ", ".join(sorted(map(_origin, points)))
        raise ConfigError(f"mode {shown(mode)} is offered by several plug-ins ({origins}); keep one of them")
    return points[0]


def _made_by_plug_in(point: EntryPoint, options: Options) -> IUMBPRuntime:
    """Load and call a plug-in. Its code isn't ours: what it raises becomes one sentence that names it."""
    who = f"the plug-in of mode {shown(point.name)} ({_origin(point)})"
    try:
        make: Callable[[Options], IUMBPRuntime] = point.load()
        runtime = make(options)
    except UMBPError:
        raise
    except Exception as error:
        raise ConfigError(f"{who} failed: {type(error).__name__}: {error}") from error
    if not isinstance(runtime, IUMBPRuntime):
        raise ConfigError(f"{who} returned a {type(runtime).__name__}, which can't make handles")
    capabilities_of(runtime)
    return runtime


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name}: {point.value}" if point.dist else point.value
