"""What a user chooses by name: built in and imported when chosen, or offered by an installed plug-in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from umbp.errors import ConfigError, UMBPError
from umbp.kinds import nearest, shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choices:
    """Makers by name. A built-in name can't be taken by a plug-in."""

    what: str
    """What is made, as users call it."""
    group: str
    """The entry-point group of plug-ins."""
    built_in: Mapping[str, tuple[str, str]]
    """Module and attribute."""

    def make(self, name: str, call: Callable[[Any], object], check: Callable[[object, str], T]) -> T:
        """What `call` makes with the maker of that name. `ConfigError` of one sentence where there is none or
        a plug-in fails: its code isn't ours. `check` takes what came and who made it, and says what is wrong.
        """
        if name in self.built_in:
            module, attribute = self.built_in[name]
            return check(
                call(getattr(import_module(module), attribute)), f"the built-in {self.what} {name!r}"
            )
        point = self._plug_in(name)
        who = f"the plug-in of {self.what} {shown(point.name)} ({_origin(point)})"
        try:
            made = call(point.load())
        except UMBPError:
            raise
        except Exception as error:
            raise ConfigError(f"{who} failed: {type(error).__name__}: {error}") from error
        return check(made, who)

    def require(self, name: str) -> None:
        """`ConfigError` of one sentence where nothing here has the name."""
        if name not in self.built_in:
            self._plug_in(name)

    def plug_ins(self) -> list[str]:
        """The names that installed plug-ins add, sorted."""
        return sorted({point.name for point in _offered(self.group, tuple(sys.path))} - set(self.built_in))

    def _plug_in(self, name: str) -> EntryPoint:
        points = [point for point in _offered(self.group, tuple(sys.path)) if point.name == name]
        if not points:
            known = [*self.built_in, *self.plug_ins()]
            hint = nearest(name, known) or ";"
            raise ConfigError(f"unknown {self.what} {shown(name)}{hint} known here: {', '.join(known)}")
        if len({point.value for point in points}) > 1:
            origins = ", ".join(sorted(map(_origin, points)))
            raise ConfigError(
                f"{self.what} {shown(name)} is offered by several plug-ins ({origins}); keep one of them"
            )
        return points[0]


@lru_cache(maxsize=8)
def _offered(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """What is installed on the path. All packages' metadata is read for it, which takes some 30 ms."""
    return tuple(entry_points(group=group))


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name}: {point.value}" if point.dist else point.value
