"""Redis, Valkey and whoever speaks their protocol, as a cluster store: one server, by the client `redis`.

Any thread may call; each call has a connection of its own meanwhile, and every wait of a connection is
bounded by `timeout_ms`. A batch is one pipeline, so one round trip.

- `SET ... NX` is whole or not at all, and keeps what is there: nobody reads half an object.
- `GETRANGE` up to one byte more than the object has: what is longer shows, and isn't sent whole. The value
  comes as bytes and is copied into its range: the client offers no way to receive there. Puts hand the
  client a view of the range, which it sends as it is.
- `GETRANGE` answers the same for what is empty and what is absent. Where it gave nothing a `GET` tells, by
  itself: two commands would take for empty what came or went between them.
- `SCAN` finds every key that is there from its beginning to its end, so that a prefix is gone afterwards.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import re
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from umbp.errors import ConfigError
from umbp.kinds import Flag, Text, Whole, shown
from umbp.options import Options
from umbp.store.base import Outcome, StoreError, StoreTraits
from umbp.store.settings import read_settings, setting

logger = logging.getLogger("vllm.umbp")

NAME = "redis"

TRIED_WITH = "6.2"
"""The server's version that the tests run."""

TRAITS = StoreTraits(
    name=NAME,
    # A pipeline of so many questions takes some 20 ms, most of them the client's.
    most_keys=4096,
    # The values of a batch are in memory once more until they are copied to their ranges.
    most_objects=256,
    most_bytes=32 << 20,
    lease_s=0.0,
    registers=False,
    recovers=True,
)

SCAN_COUNT = 1000
"""Keys that the server looks at in one step of a scan: a millisecond in which it does nothing else."""

_REFUSALS_FOR_NOW = ("OOM", "LOADING", "BUSY", "TRYAGAIN", "MISCONF")
"""How errors begin of a server that is well and can't do it now: no room, starting, in a script, no disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """`store_options` of the store `redis`."""

    url: str | None = setting(
        None,
        Text("an URL: redis://, rediss:// (TLS) or unix://", r"(redis|rediss|unix)://\S+"),
        "where the server is, without a password",
        excludes="host",
    )
    host: str = setting("127.0.0.1", Text("a host's name or address", r"\S+"), "where the server is")
    port: int = setting(6379, Whole(1, 65535, ""), "its port")
    database: int = setting(0, Whole(0, 65535, ""), "the number of its database")
    username: str | None = setting(
        None, Text("a name", r"\S+"), "whom to log in as", default="the default user"
    )
    password_variable: str = setting(
        "UMBP_REDIS_PASSWORD",
        Text("a variable's name", r"[A-Za-z_][A-Za-z0-9_]*"),
        "the variable of the environment that holds the password, if there is one",
    )
    tls: bool = setting(False, Flag(), "speak TLS, and check the server's certificate")
    tls_ca_file: str | None = setting(
        None, Text("an absolute path", r"/.*"), "who signs it", default="those whom the system trusts"
    )
    connect_timeout_ms: int = setting(1000, Whole(1, 600_000, "ms"), "for making a connection")
    timeout_ms: int = setting(
        1500, Whole(1, 600_000, "ms"), "a server that is silent for longer is taken for dead"
    )


def make_store(options: Options, *, serves_memory: bool) -> RedisStore:
    settings = read_settings(RedisSettings, NAME, options.store_options)
    if settings.url is not None and (without := sorted(_WITHOUT_EFFECT & set(options.store_options))):
        raise ConfigError(
            f"option '{without[0]}' in 'store_options' has no effect beside 'url'; say it there"
        )
    if settings.url is not None and "@" in settings.url and ":" in settings.url.rpartition("@")[0][8:]:
        raise ConfigError(
            "option 'url' in 'store_options' holds a password, which logs may show; put it into the "
            f"environment as {settings.password_variable}"
        )
    if settings.url is not None:
        _require_plain(settings.url)
    if settings.tls_ca_file is not None and not (settings.tls or (settings.url or "").startswith("rediss:")):
        raise ConfigError("option 'tls_ca_file' in 'store_options' has no effect without 'tls'")
    if settings.tls_ca_file is not None:
        _require_certificates(settings.tls_ca_file)
    if importlib.util.find_spec("redis") is None:
        raise ConfigError("store 'redis' needs its package: pip install 'umbp[redis]'")
    return RedisStore(settings)


_WITHOUT_EFFECT = {"port", "database", "tls"}


def _require_certificates(path: str) -> None:
    """`ConfigError` for a file that TLS would fail with as if the server were wrong."""
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:
        reason = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(
            f"option 'tls_ca_file' in 'store_options' can't be read: {path} ({reason}); give a file of "
            "certificates in PEM"
        ) from None


def _require_plain(url: str) -> None:
    """`ConfigError` for what the client would take as settings of its own, or break at."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"option 'url' in 'store_options' is no URL: {shown(url)}") from None
    try:
        is_right = parts.port is None or parts.port > 0
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError("option 'url' in 'store_options' must have a port from 1 to 65535, if it has one")
    database = parts.path.strip("/")
    if parts.scheme != "unix" and not re.fullmatch(r"[0-9]{0,5}", database):
        raise ConfigError(
            f"option 'url' in 'store_options' must end in the number of a database, not {shown(database)}"
        )
    if (parts.query or parts.fragment) and not re.fullmatch(r"db=[0-9]{1,5}", parts.query + parts.fragment):
        raise ConfigError(
            "option 'url' in 'store_options' takes nothing behind '?' but db=NUMBER; write settings beside it"
        )


class RedisStore:
    """See the module; the verbs are those of `ClusterStore`."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._redis: Any = importlib.import_module("redis")
        self._lock = threading.Lock()
        self._client: Any = None
        self._is_closed = False
        self._told: set[str] = set()

    @property
    def traits(self) -> StoreTraits:
        return TRAITS

    def open(self) -> None:
        client = self._connected()
        try:
            client.ping()
        except (self._redis.RedisError, OSError) as error:
            client.close()
            # What it refuses it would refuse again, and something else won't become a Redis.
            is_final = self._is_refusal(error) or isinstance(error, self._redis.exceptions.InvalidResponse)
            raise (ConfigError if is_final else StoreError)(self._why_not(error)) from error
        except UnicodeError as error:  # of Python's own, before anybody is asked
            client.close()
            raise ConfigError(
                f"{self._place()} names no host that there can be ({error}); mend 'store_options'"
            ) from error
        with self._lock:
            if not self._is_closed:
                self._client = client
                return
        client.close()
        raise StoreError("the store was closed while it was opened")

    def register(self, address: int, size: int) -> None:
        """Nothing to do: any memory will do."""

    def unregister(self, address: int, size: int) -> None:
        """Nothing to do."""

    def exists(self, keys: Sequence[str]) -> Sequence[Outcome]:
        answers = self._ask(len(keys), lambda pipe: [pipe.exists(key) for key in keys])
        return [self._outcome(each, _found) for each in answers]

    def put(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[Outcome]:
        ranges = [_view(*each) for each in zip(addresses, sizes, strict=True)]
        answers = self._ask(
            len(keys), lambda pipe: [pipe.set(*each, nx=True) for each in zip(keys, ranges, strict=True)]
        )
        return [self._outcome(each, _done) for each in answers]

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[Outcome]:
        answers = self._ask(
            len(keys),
            lambda pipe: [pipe.getrange(key, 0, size) for key, size in zip(keys, sizes, strict=True)],
        )
        outcomes = []
        for value, address, size in zip(answers, addresses, sizes, strict=True):
            outcome = self._outcome(value, _fetched)
            if outcome is _DONE and len(value) != size:
                outcome = Outcome.DAMAGED
            if outcome is _DONE:
                ctypes.memmove(address, value, size)
            outcomes.append(outcome)
        nothing = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.MISS]
        answers = self._ask(len(nothing), lambda pipe: [pipe.get(keys[place]) for place in nothing])
        for place, value in zip(nothing, answers, strict=True):
            outcomes[place] = self._outcome(value, _empty)
        return outcomes

    def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        if not keys:
            return []
        (answer,) = self._ask(1, lambda pipe: pipe.unlink(*keys))
        return [self._outcome(answer, _done)] * len(keys)

    def remove_prefix(self, prefix: str) -> Outcome:
        pattern = "".join(f"\\{each}" if each in "*?[]\\" else each for each in prefix) + "*"
        cursor = 0
        while True:
            (step,) = self._ask(1, partial(_scan, cursor=cursor, pattern=pattern))
            if (outcome := self._outcome(step, _done)) is not _DONE:
                return outcome
            cursor, found = step
            if found and (outcome := self.remove(found)[0]) is not _DONE:
                return outcome
            if cursor == 0:
                return _DONE

    def probe(self) -> bool:
        (answer,) = self._ask(1, lambda pipe: pipe.ping())
        if isinstance(answer, Exception) and answer is not _CLOSED:
            raise StoreError(self._why_not(answer))
        return answer is True

    def describe(self) -> Mapping[str, str]:
        info, now = self._ask(2, lambda pipe: (pipe.info(), pipe.time()))
        told = {"server": self._place(), "tried with": TRIED_WITH}
        if isinstance(now, tuple):
            told["clock"] = f"{now[0]}.{now[1]:06}"
        if isinstance(info, Mapping):
            for name, field in _TOLD.items():
                if field in info:
                    told[name] = str(info[field])
        return told

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()
            # Those who are inside lose their connections, and so don't hold up anybody.
            client.connection_pool.disconnect()

    def _ask(self, count: int, say: Callable[[Any], object]) -> Sequence[Any]:
        """One round trip: the answers, each a value or an error, as many as `count`."""
        if count == 0:
            return []
        with self._lock:
            client = self._client
        if client is None:
            return [_CLOSED] * count
        try:
            pipe = client.pipeline(transaction=False)
            say(pipe)
            answers: Sequence[Any] = pipe.execute(raise_on_error=False)
        except (self._redis.RedisError, OSError, ValueError) as error:
            return [error] * count
        except Exception:
            # A connection that `close` takes away in the middle breaks in ways of its own.
            if not self._is_closed:
                raise
            return [_CLOSED] * count
        return answers if len(answers) == count else [_CLOSED] * count

    def _outcome(self, answer: Any, of_value: Callable[[Any], Outcome]) -> Outcome:
        if not isinstance(answer, Exception):
            return of_value(answer)
        text = str(answer)
        if isinstance(answer, self._redis.BusyLoadingError) or text.startswith(_REFUSALS_FOR_NOW):
            return Outcome.LATER
        if isinstance(answer, self._redis.OutOfMemoryError):
            return Outcome.LATER
        if isinstance(answer, self._redis.ResponseError) and "WRONGTYPE" in text:
            return Outcome.DAMAGED
        if isinstance(answer, self._redis.ResponseError):
            self._tell(answer)
        return Outcome.BROKEN

    def _tell(self, answer: Exception) -> None:
        """Its pings may go well all the same. Once for each kind of answer."""
        kind = f"{type(answer).__name__} {str(answer).partition(' ')[0]}"
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("UMBP: the Redis at %s does not do what it is asked: %s", self._place(), answer)

    def _connected(self) -> Any:
        """A client: pooled connections, each tried once more at once where it turns out to be dead."""
        settings, redis = self._settings, self._redis
        common: dict[str, Any] = {
            "socket_timeout": settings.timeout_ms / 1000,
            "socket_connect_timeout": settings.connect_timeout_ms / 1000,
            "username": settings.username,
            "password": os.environ.get(settings.password_variable),
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 1, (redis.ConnectionError,)),
            "client_name": "umbp",
        }
        if settings.tls_ca_file is not None:
            common["ssl_ca_certs"] = settings.tls_ca_file
        if settings.url is not None:
            return redis.Redis.from_url(settings.url, **common)
        return redis.Redis(
            host=settings.host, port=settings.port, db=settings.database, ssl=settings.tls, **common
        )

    def _is_refusal(self, error: Exception) -> bool:
        """Whether somebody answers, and won't have us as we are."""
        redis = self._redis
        if isinstance(error, redis.exceptions.ClusterDownError):  # it may, later
            return False
        return isinstance(error, redis.ResponseError | redis.AuthenticationError)

    def _why_not(self, error: Exception) -> str:
        """Why no connection can be made, and what to do: one sentence."""
        if self._is_refusal(error):
            variable = self._settings.password_variable
            if "already authenticated" in str(error) or "NOAUTH" in str(error):
                return (
                    f"the Redis at {self._place()} wants a password; put it in the environment's {variable}"
                )
            who = "is 'database' there, and are 'username' and the password in the environment's"
            return f"the Redis at {self._place()} refuses us ({error}); {who} {variable} right?"
        if isinstance(error, self._redis.exceptions.InvalidResponse):
            return f"what answers at {self._place()} is no Redis ({error}); mend 'store_options'"
        ask = " (does it speak TLS at that port?)" if self._speaks_tls() else ""
        return f"no Redis answers at {self._place()} ({error}); start one there, or mend 'store_options'{ask}"

    def _speaks_tls(self) -> bool:
        return self._settings.tls or (self._settings.url or "").startswith("rediss:")

    def _place(self) -> str:
        return self._settings.url or f"{self._settings.host}:{self._settings.port}"


_DONE = Outcome.DONE
_CLOSED = ConnectionError("closed")
_TOLD = {
    "version": "redis_version",
    "memory used": "used_memory_human",
    "memory at most": "maxmemory_human",
    "when full": "maxmemory_policy",
    "objects evicted": "evicted_keys",
}


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _done(value: Any) -> Outcome:
    return _DONE


def _found(value: Any) -> Outcome:
    return _DONE if value else Outcome.MISS


def _fetched(value: Any) -> Outcome:
    """Of an answer to `GETRANGE`, whatever its size."""
    return _DONE if value else Outcome.MISS


def _empty(value: Any) -> Outcome:
    """Of a `GET` of what was empty or absent a moment ago; what is neither now has just been put."""
    return Outcome.DAMAGED if value == b"" else Outcome.MISS


def _scan(pipe: Any, cursor: int, pattern: str) -> None:
    pipe.scan(cursor, match=pattern, count=SCAN_COUNT)
