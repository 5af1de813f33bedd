"""Name to store: the built-in ones, imported when chosen, and plug-ins of the entry-point group
`umbp.stores`.

A plug-in's name is what the option `store` says; its value is a callable that takes the options and
`serves_memory` and returns a `ClusterStore` that isn't open yet. A name that is built in can't be taken by a
plug-in.
"""

from __future__ import annotations

from typing import Protocol

from umbp.errors import ConfigError
from umbp.options import Options
from umbp.plugins import Choices
from umbp.store.base import ClusterStore, StoreTraits

STORES = Choices(
    what="store",
    group="umbp.stores",
    built_in={
        "mooncake": ("umbp.store.mooncake", "make_store"),
        "redis": ("umbp.store.redis", "make_store"),
    },
)


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

    def made_by(make: StoreMaker) -> ClusterStore:
        return make(options, serves_memory=serves_memory)

    return STORES.make(options.store or "", made_by, _checked)


def _checked(store: object, who: str) -> ClusterStore:
    if not isinstance(store, ClusterStore):
        raise ConfigError(f"{who} returned a {type(store).__name__}, which lacks verbs of a store")
    if not isinstance(store.traits, StoreTraits):
        raise ConfigError(f"{who} made a store whose traits are a {type(store.traits).__name__}")
    return store
