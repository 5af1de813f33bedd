"""Name to store: the built-in ones, imported when chosen, and plug-ins of the entry-point group
`umbp.stores`.

A plug-in's name is what the option `store` says; its value is a callable that takes the options and
`serves_memory` and returns a `ClusterStore` that isn't open yet. A name that is built in can't be taken by a
plug-in.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from umbp.errors import ConfigError, UMBPError
from umbp.kinds import nearest, shown
from umbp.options import Options
from umbp.store.base import ClusterStore, StoreTraits

GROUP = "umbp.stores"

BUILT_IN = {
    "mooncake": ("umbp.store.mooncake", "make_store"),
    "redis": ("umbp.store.redis", "make_store"),
}
"""The built-in stores, by module and maker."""


class StoreMaker(Protocol):
    """What a plug-in offers. It checks `options.store_options` (`umbp.store.settings` helps), raises
    `ConfigError` where they are wrong or a library is missing, and connects to nothing.
    """

    def __call__(self, options: Options, *, serves_memory: bool) -> ClusterStore: ...


def create_store(options: Options, *, serves_memory: bool) -> ClusterStore:
    """A store as `options.store` and `store_options` say, not open yet; `ConfigError` of one sentence where
    there is none or it can't be made.

    `serves_memory`: whether this process may offer memory to the cluster, as workers do and schedulers don't.
    """
    name = options.store or ""
    if name in BUILT_IN:
        module, maker = BUILT_IN[name]
        make: StoreMaker = getattr(import_module(module), maker)
        return make(options, serves_memory=serves_memory)
    return _made_by_plug_in(_plug_in(name), options, serves_memory)


def plug_in_stores() -> list[str]:
    """The stores that installed plug-ins add, sorted; one that takes a built-in name is not among them."""
    return sorted({point.name for point in entry_points(group=GROUP)} - set(BUILT_IN))


def _plug_in(name: str) -> EntryPoint:
    points = tuple(entry_points(group=GROUP, name=name))
    if not points:
        known = [*BUILT_IN, *plug_in_stores()]
        hint = nearest(name, known) or ";"
        raise ConfigError(f"unknown store {shown(name)}{hint} known here: {', '.join(known)}")
    if len({point.value for point in points}) > 1:
        origins = ", ".join(sorted(map(_origin, points)))
        raise ConfigError(f"store {shown(name)} is offered by several plug-ins ({origins}); keep one of them")
    return points[0]


def _made_by_plug_in(point: EntryPoint, options: Options, serves_memory: bool) -> ClusterStore:
    """Load and call a plug-in. Its code isn't ours: what it raises becomes one sentence that names it."""
    who = f"the plug-in of store {shown(point.name)} ({_origin(point)})"
    try:
        make: StoreMaker = point.load()
        store = make(options, serves_memory=serves_memory)
    except UMBPError:
        raise
    except Exception as error:
        raise ConfigError(f"{who} failed: {type(error).__name__}: {error}") from error
    if not isinstance(store, ClusterStore):
        raise ConfigError(f"{who} returned a {type(store).__name__}, which lacks verbs of a store")
    if not isinstance(store.traits, StoreTraits):
        raise ConfigError(f"{who} made a store whose traits are a {type(store.traits).__name__}")
    return store


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name}: {point.value}" if point.dist else point.value
