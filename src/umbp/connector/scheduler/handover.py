"""What a prefilling engine tells a decoding one of a request, by way of the response and whoever stands
between them: how much of the prompt it has begun to store.

vLLM carries it as `kv_transfer_params`: out with the response, in with the next engine's request. So what
comes in is a client's input, and may be anything. Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vllm.logger import init_logger

from umbp.connector import compat
from umbp.connector.groups import CacheShape, GroupKind
from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.scheduler.state import RequestState
from umbp.kinds import shown

logger = init_logger("vllm.umbp")

MOST_TOKENS = 2**31 - 1
COMPLAINT_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class HandOver:
    """A prompt's first tokens that are stored, or soon will be; the engine's hash of that prefix, in hex; and
    the namespace in which it is stored.
    """

    stored_tokens: int
    prefix_hash: str
    namespace: str

    @classmethod
    def parse(cls, value: object) -> HandOver:
        """From what a client has sent; `ValueError` says in a few words what is wrong with it."""
        if not isinstance(value, Mapping):
            raise ValueError(f"must be an object, not {shown(value)}")
        for field in fields(cls):
            if field.name not in value:
                raise ValueError(f"lacks {field.name!r}")
        tokens, prefix_hash, namespace = (value[field.name] for field in fields(cls))
        if type(tokens) is not int or not 0 <= tokens <= MOST_TOKENS:
            raise ValueError(f"has {shown(tokens)} for 'stored_tokens', which is a whole number")
        if not isinstance(prefix_hash, str) or not isinstance(namespace, str):
            raise ValueError("has no text for 'prefix_hash' or 'namespace'")
        return cls(tokens, prefix_hash, namespace)


class HandOvers:
    """Tells of the requests that end here, and reads what is told of those that begin here."""

    def __init__(
        self,
        pool: PoolView,
        shape: CacheShape,
        mode: str,
        *,
        always_tells: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`mode`: both engines' way to keep objects, a part of the name under which it is told, since vLLM
        takes no name twice from several connectors; `always_tells`: also where nobody asks for it.
        """
        self._pool = pool
        self._shape = shape
        self._name = f"umbp.{mode}"
        self._always_tells = always_tells
        self._clock = clock
        self._last_complaint_s = float("-inf")

    # The engine that prefills

    def told(self, state: RequestState) -> dict[str, Any] | None:
        """What to send along with the response of a request that ends; None for nothing. Not asked for by
        the client but by whoever hands its request over, as vLLM's connectors have it: `do_remote_decode`.
        """
        params = compat.transfer_params(state.request)
        is_asked = isinstance(params, Mapping) and params.get("do_remote_decode") is True
        if not (is_asked or self._always_tells) or not self._pool.is_open:
            return None
        tokens = self._stored_tokens(state)
        if not tokens:
            return None
        name = state.request.block_hashes[tokens // self._shape.hash_tokens - 1]
        return {self._name: asdict(HandOver(tokens, name.hex(), self._namespace))}

    def _stored_tokens(self, state: RequestState) -> int:
        """The longest hit that can come of what was planned to be stored of the request."""
        if state.is_stale or state.has_lost_store:
            return 0
        most = min(state.tracker.saved_tokens, state.request.num_prompt_tokens - 1)
        most -= most % self._shape.hit_tokens
        for group in self._shape.groups:
            if group.kind is not GroupKind.STATE:
                most -= most % group.block_tokens
        ends = [
            state.state_ends.get(group.group_id, set())
            for group in self._shape.groups
            if group.kind is GroupKind.STATE
        ]
        if not ends:
            return most
        return max((end for end in set.intersection(*ends) if end <= most), default=0)

    @property
    def _namespace(self) -> str:
        return str(self._pool.codec.namespace)

    # The engine that decodes

    def promised_tokens(self, state: RequestState) -> int:
        """How many of the prompt's tokens another engine stores; 0 where nobody has told so, or of another
        prompt. Looked at once a request; never raises.
        """
        if state.promised_tokens is None:
            state.promised_tokens = self._promised_tokens(state)
        return state.promised_tokens

    def _promised_tokens(self, state: RequestState) -> int:
        params = compat.transfer_params(state.request)
        if not isinstance(params, Mapping) or self._name not in params or not self._pool.is_open:
            return 0
        try:
            told = HandOver.parse(params[self._name])
        except ValueError as error:
            self._complain(f"a request's kv_transfer_params are of no use: {shown(self._name)} {error}")
            return 0
        if told.namespace != self._namespace:
            self._complain(
                f"a request was handed over by an engine of namespace {shown(told.namespace)}, and this one "
                f"has {shown(self._namespace)}: they find nothing of each other's"
            )
            return 0
        hashes, last = state.request.block_hashes, told.stored_tokens // self._shape.hash_tokens
        is_same = 0 < last <= len(hashes) and hashes[last - 1].hex() == told.prefix_hash
        return told.stored_tokens if is_same else 0

    def _complain(self, sentence: str) -> None:
        now = self._clock()
        if now - self._last_complaint_s > COMPLAINT_PAUSE_S:
            self._last_complaint_s = now
            logger.warning("UMBP: %s", sentence)
