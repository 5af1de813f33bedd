"""What is offered of a prompt in several cache groups: what the engine itself would find, had it all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Shape, cache_configs, make_config
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from umbp.connector import compat
from umbp.connector.groups import CacheGroup, CacheShape, GroupKind
from umbp.connector.hits import HitRules
from umbp.connector.scheduler.account import Quarantine
from umbp.connector.scheduler.find import ChainFinder, GroupsFinder
from umbp.testing.clock import TickClock

HASHES = [bytes([number]) * 32 for number in range(48)]
ATTENTION: dict[str, Any] = {"num_kv_heads": 2, "head_size": 4, "dtype": torch.bfloat16}


def full(block: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, **ATTENTION)


def window(tokens: int, block: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **ATTENTION)


def chunks(tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=tokens, **ATTENTION)


def states(block: int = 16) -> MambaSpec:
    return MambaSpec(block_size=block, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")


MODELS: dict[str, list[Any]] = {
    "full": [full()],
    "window": [window(40)],
    "full and window": [full(), window(40)],
    "full and two windows": [full(), window(40), window(100)],
    "windows alone": [window(16), window(100)],
    "small blocks in the window": [full(32), window(40)],
    "small blocks in the full one": [full(), window(40, 32)],
    "full and chunks": [full(), chunks(64)],
    "full and states": [full(), states()],
    "full, window and states": [full(), window(33), states(32)],
    "states alone": [states()],
    "full and states, finer hashes": [full(32), states(32)],
    "full, two kinds of states, finer hashes": [full(64), states(32), states(64)],
    "full, window and states, finer hashes": [full(64), window(40), states(32)],
    "dealt tokens and states": [full(), states()],
}
FINER_HASHES = {name: 16 for name in MODELS if "finer" in name}
DEALT = {"dealt tokens and states": 2}
DRAFTED = [name for name in MODELS if "chunks" not in name]


class Pool:
    """What is stored, by group; some of it goes at the moment that somebody wants to hold it."""

    def __init__(self, stored: dict[int, set[bytes]]) -> None:
        self.stored_names = stored
        self.vanishing: set[tuple[int, bytes]] = set()
        self.held: dict[str, list[tuple[int, bytes]]] = {}

    def present(self, group_id: int, names: Sequence[bytes]) -> int:
        stored = self.stored_names[group_id]
        return next((i for i, name in enumerate(names) if name not in stored), len(names))

    def stored(self, group_id: int, names: Sequence[bytes]) -> list[bool]:
        return [name in self.stored_names[group_id] for name in names]

    def hold(self, owner: str, group_id: int, names: Sequence[bytes]) -> int:
        self.stored_names[group_id] -= {name for group, name in self.vanishing if group == group_id}
        held = self.present(group_id, names)
        self.held.setdefault(owner, []).extend((group_id, name) for name in names[:held])
        return held

    def unhold(self, owner: str) -> None:
        self.held.pop(owner, None)


class Model:
    """One model's cache configuration, and the engine's own coordinator over a real block pool."""

    def __init__(
        self,
        root: Path,
        specs: Sequence[Any],
        *,
        drafts: bool,
        match_tokens: int | None = None,
        dcp: int = 1,
    ) -> None:
        self.config: VllmConfig = copy.copy(make_config(root, Shape(max_model_len=1024, blocks=100)))
        cache: KVCacheConfig = cache_configs(self.config)[-1]
        cache.kv_cache_groups = [
            KVCacheGroupSpec([f"layer{number}"], copy.copy(spec)) for number, spec in enumerate(specs)
        ]
        cache.num_blocks = 400
        cache.hash_block_size = None
        if drafts:
            self.config.speculative_config = _Drafts()
        self.config.cache_config = copy.copy(self.config.cache_config)
        self.config.cache_config.prefix_match_unit = match_tokens
        self.config.parallel_config = copy.copy(self.config.parallel_config)
        self.config.parallel_config.decode_context_parallel_size = dcp
        self.cache = cache
        self.shape = compat.cache_shape(self.config, cache)
        self.hits = HitRules(self.config, cache)
        self._coordinator: Any = get_kv_cache_coordinator(
            cache,
            max_model_len=1024,
            max_in_flight_tokens=64,
            use_eagle=drafts,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=dcp,
            pcp_world_size=1,
            scheduler_block_size=self.block_tokens,
            hash_block_size=self.shape.hash_tokens,
            num_prefill_lookahead=int(drafts),
        )
        assert self._coordinator.enable_partial_hash_hits == self.shape.is_fine if len(specs) > 1 else True

    @property
    def block_tokens(self) -> int:
        """After so many tokens a block ends in every group."""
        return compat.scheduler_block_tokens(self.config, self.cache)

    def own_hit(self, stored: dict[int, set[bytes]], limit: int) -> int:
        """The engine's answer, had it computed all these blocks itself."""
        pool = self._coordinator.block_pool
        pool.reset_prefix_cache()
        for group_id, names in stored.items():
            for name, block in zip(names, pool.get_new_blocks(len(names)), strict=True):
                key = make_block_hash_with_group_id(name, group_id)  # type: ignore[arg-type]
                block._block_hash = key
                pool.cached_block_hash_to_block.insert(key, block)
        _, tokens, *_ = self._coordinator.find_longest_cache_hit(HASHES, limit)
        for block in pool.blocks:
            if block.ref_cnt and not block.is_null:
                pool.free_blocks([block])
        return int(tokens)


class _Drafts:
    """A speculative configuration, as far as hits depend on it."""

    method = "eagle"

    def use_eagle(self) -> bool:
        return True

    use_eagle_block_drop = use_eagle

    def use_multi_module_mtp(self) -> bool:
        return False


@pytest.fixture(scope="module")
def models(root: Path) -> dict[tuple[str, bool], Model]:
    return {
        (name, drafts): Model(
            root,
            MODELS[name],
            drafts=drafts,
            match_tokens=FINER_HASHES.get(name),
            dcp=DEALT.get(name, 1),
        )
        for name, drafts in CASES
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hits")


def finder_for(model: Model, pool: Any, quarantine: Quarantine) -> Any:
    if model.shape.is_chain:
        return ChainFinder(pool, quarantine, model.shape)
    return GroupsFinder(pool, quarantine, model.shape, model.hits)


def is_whole(model: Model, stored: dict[int, set[bytes]], end: int, limit: int) -> bool:
    """Whether all is there that a hit of so many tokens reads, or that speculation wants to see behind it."""
    for group in model.shape.groups:
        there = stored[group.group_id]
        needed = model.hits.needed(group.group_id, end)
        names = group.names(HASHES)
        if model.shape.is_fine and group.kind is GroupKind.FULL:
            is_there = set(names[: end // group.block_tokens]) <= there
            is_there &= has_tail(model, group, there, end, limit)
        elif model.shape.is_fine and group.kind is GroupKind.STATE:
            is_there = HASHES[end // model.shape.hash_tokens - 1] in there
        else:
            stop = needed.stop + group.drops_last_block
            seen = len(names) if len(model.shape.groups) > 1 else limit // group.block_tokens
            is_there = stop <= seen and set(names[needed.start : stop]) <= there
        if not is_there:
            return False
    return True


def has_tail(model: Model, group: CacheGroup, there: set[bytes], end: int, limit: int) -> bool:
    """Whether the block that a hit ends inside of is there, up to its end or further, and with a hash more
    where speculation gives up one. The engine looks no further than the limit, and that hash.
    """
    unit = model.shape.hit_tokens
    end += unit * group.drops_last_block
    whole = (end - 1) // group.block_tokens * group.block_tokens
    if end % group.block_tokens == 0:
        ends = [end]
    else:
        last = min(whole + group.block_tokens, limit + unit * group.drops_last_block, len(HASHES) * unit)
        ends = list(range(end, last + 1, unit))
    before = set(group.names(HASHES)[: whole // group.block_tokens])
    return before <= there and any(HASHES[one // unit - 1] in there for one in ends if one <= last_hash(unit))


def last_hash(unit: int) -> int:
    return len(HASHES) * unit


CASES = [(name, False) for name in MODELS] + [(name, True) for name in DRAFTED]


@st.composite
def contents(draw: st.DrawFn) -> list[set[bytes]]:
    """For up to three groups: a run of hashes from the first on, with holes."""
    made = []
    for _ in range(3):
        run = draw(st.integers(0, len(HASHES)))
        holes = draw(st.sets(st.integers(0, len(HASHES) - 1), max_size=4))
        made.append({HASHES[number] for number in range(run) if number not in holes})
    return made


def stored_of(shape: CacheShape, made: Sequence[set[bytes]], tails: Sequence[int]) -> dict[int, set[bytes]]:
    """What is stored of each group, where of the blocks that aren't whole only those are that end in one of
    the `tails`.
    """
    stored = {}
    for group in shape.groups:
        names = set(group.names(HASHES))
        if shape.is_fine and group.kind in (GroupKind.FULL, GroupKind.STATE):
            names |= {HASHES[place] for place in tails}
        stored[group.group_id] = names & made[group.group_id]
    return stored


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{name}{' drafted' if drafts else ''}" for name, drafts in CASES]
)
@settings(max_examples=30)
@given(
    made=contents(),
    limit=st.integers(0, 48 * 16),
    local=st.integers(0, 12),
    tails=st.lists(st.integers(0, 47), max_size=24),
)
def test_what_is_offered_is_what_the_engine_would_find(
    models: dict[tuple[str, bool], Model],
    case: tuple[str, bool],
    made: list[set[bytes]],
    limit: int,
    local: int,
    tails: list[int],
) -> None:
    """The engine's own blocks may be missing outside: the answer is that of both together."""
    model = models[case]
    shape = model.shape
    stored = stored_of(shape, made, tails)
    start = min(local * model.block_tokens, 48 * 16 // model.block_tokens * model.block_tokens)
    limit = max(limit // shape.hit_tokens * shape.hit_tokens, start)
    together = {
        group.group_id: stored[group.group_id] | set(group.names(HASHES)[: start // group.block_tokens])
        for group in shape.groups
    }
    pool = Pool({group_id: set(names) for group_id, names in stored.items()})
    hit = finder_for(model, pool, Quarantine(TickClock())).hold("r", HASHES, start, limit)
    end = hit.end
    steps = range(limit, start, -shape.hit_tokens)
    assert end == next((tokens for tokens in steps if is_whole(model, together, tokens, limit)), start)
    if not (case[1] and any(group.kind is GroupKind.WINDOW for group in shape.groups)):
        # With drafts the engine's own search in windows is off by a block now and then, either way.
        assert end == max(model.own_hit(together, limit), start)
    held = pool.held.get("r", [])
    for group in shape.groups:
        names = group.names(HASHES)
        needed = [
            names[row]
            for row in model.hits.needed(group.group_id, end)
            if start // group.block_tokens <= row < end // group.block_tokens and end > start
        ]
        if end % group.block_tokens:
            needed.append(hit.tails[group.group_id])
            held_tokens = (HASHES.index(hit.tails[group.group_id]) + 1) * shape.hash_tokens
            assert end <= held_tokens <= -(-end // group.block_tokens) * group.block_tokens
            assert held_tokens == end or group.kind is GroupKind.FULL
        assert {name for group_id, name in held if group_id == group.group_id} >= set(needed)


def test_what_goes_before_it_is_held_shortens_the_hit(models: dict[tuple[str, bool], Model]) -> None:
    model = models["full and window", False]
    pool = Pool({0: set(HASHES), 1: set(HASHES)})
    finder = finder_for(model, pool, Quarantine(TickClock()))
    pool.vanishing = {(1, HASHES[39])}
    assert finder.hold("r", HASHES, 0, 40 * 16).end == 39 * 16
    assert {name for group_id, name in pool.held["r"] if group_id == 1} == set(HASHES[36:39])


def test_nothing_is_held_where_nothing_is_offered(models: dict[tuple[str, bool], Model]) -> None:
    model = models["full and window", False]
    pool = Pool({0: set(HASHES), 1: set()})
    assert finder_for(model, pool, Quarantine(TickClock())).hold("r", HASHES, 0, 640).end == 0
    assert pool.held == {}


def test_what_failed_to_load_is_not_offered_again(models: dict[tuple[str, bool], Model]) -> None:
    for name in ("full", "full and window", "full and states"):
        model = models[name, False]
        quarantine = Quarantine(TickClock())
        group = model.shape.groups[-1]
        quarantine.add((group.group_id, HASHES[9]))
        pool = Pool({group.group_id: set(HASHES) for group in model.shape.groups})
        end = finder_for(model, pool, quarantine).hold("r", HASHES, 0, 10 * 16).end
        assert end == 9 * 16, name


@pytest.mark.parametrize(
    ("specs", "kinds", "hashes_per_block"),
    [
        ([full()], [GroupKind.FULL], [1]),
        ([full(32), window(40)], [GroupKind.FULL, GroupKind.WINDOW], [2, 1]),
        ([full(), chunks(64)], [GroupKind.FULL, GroupKind.CHUNK], [1, 1]),
        ([states(32), full()], [GroupKind.STATE, GroupKind.FULL], [2, 1]),
    ],
)
def test_groups_are_told_apart(
    root: Path, specs: list[Any], kinds: list[GroupKind], hashes_per_block: list[int]
) -> None:
    shape = Model(root, specs, drafts=False).shape
    assert [group.kind for group in shape.groups] == kinds
    assert [group.hashes_per_block for group in shape.groups] == hashes_per_block
    assert shape.is_chain == (kinds == [GroupKind.FULL])
    assert shape.counted.kind is GroupKind.FULL


def test_a_block_is_named_by_the_hash_at_its_end(root: Path) -> None:
    large, small = Model(root, [full(32), window(40)], drafts=False).shape.groups
    assert list(small.names(HASHES[:5])) == HASHES[:5]
    assert list(large.names(HASHES[:5])) == [HASHES[1], HASHES[3]]
