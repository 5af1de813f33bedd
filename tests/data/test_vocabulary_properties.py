"""Properties of the vocabulary over generated inputs, against models that share no code with it."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from vocabulary_vectors import Cache

from umbp.data import (
    BlockIdentityCodec,
    BlockLoadBatch,
    KVLayoutPlanner,
    KVRegion,
    RankTopology,
    RequestTracker,
    TransferJobState,
)

sizes = st.integers(1, 4)
hashes = st.binary(min_size=1, max_size=40)
ranks = st.tuples(*[st.integers(0, 9)] * 4)
namespaces = st.text(st.characters(codec="utf-8", exclude_characters=":"), min_size=1, max_size=20)


@given(sizes, sizes, sizes, sizes)
def test_workers_are_numbered_as_all_namespaces_lists_them(
    tp_groups: int, dcp: int, pcp: int, pp: int
) -> None:
    tp = tp_groups * dcp
    listed = RankTopology(tp_size=tp, dcp_size=dcp, pcp_size=pcp, pp_size=pp).all_namespaces()
    numbered = []
    for rank in range(tp * pcp * pp):
        parallel = SimpleNamespace(
            rank=rank,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
        )
        topology = RankTopology.from_vllm_config(SimpleNamespace(parallel_config=parallel))
        assert topology.rank_count == len(listed)
        numbered.append(topology.local_namespace)
    assert tuple(numbered) == listed
    assert len(set(listed)) == len(listed)


@given(namespaces, ranks, hashes, st.integers(0, 99), namespaces, ranks, hashes, st.integers(0, 99))
def test_keys_are_equal_only_where_everything_is(
    n1: str, r1: tuple[int, ...], h1: bytes, g1: int, n2: str, r2: tuple[int, ...], h2: bytes, g2: int
) -> None:
    key1 = BlockIdentityCodec(n1).key_for_namespace(h1, g1, r1)  # type: ignore[arg-type]
    key2 = BlockIdentityCodec(n2).key_for_namespace(h2, g2, r2)  # type: ignore[arg-type]
    assert (key1 == key2) == ((n1, r1, h1, g1) == (n2, r2, h2, g2))


@given(namespaces, namespaces, ranks, ranks, st.lists(st.tuples(hashes, st.integers(0, 9)), max_size=9))
def test_localized_keys_are_the_worker_s_own(
    theirs: str,
    mine: str,
    their_rank: tuple[int, int, int, int],
    my_rank: tuple[int, int, int, int],
    blocks: list[tuple[bytes, int]],
) -> None:
    tp, pcp, dcp, pp = my_rank
    worker = BlockIdentityCodec(mine, tp, pp, pcp, dcp)
    other = BlockIdentityCodec(theirs)
    keys = [other.key_for_namespace(block_hash, group, their_rank) for block_hash, group in blocks]
    assert worker.localize(keys) == [worker.key(block_hash, group) for block_hash, group in blocks]
    assert worker.localize(worker.localize(keys)) == worker.localize(keys)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[KVLayoutPlanner, dict[str, Cache], dict[str, int]]:
    """A planner, caches that fit it, and the number of pieces of a block of each layer."""
    regions, caches, pieces_of = [], {}, {}
    offset, address = 0, 4096
    for number in range(draw(st.integers(1, 5))):
        pieces = draw(sizes)
        piece_bytes = 4 * draw(st.integers(1, 8))
        spare = draw(st.integers(0, 3)) if pieces == 1 else 0
        stride = piece_bytes * (1 + spare)
        name = f"layer.{number}"
        regions.append(
            KVRegion(name, draw(st.integers(0, 1)), stride * pieces, piece_bytes * pieces, offset, 16)
        )
        caches[name] = Cache(address, stride // 4, 4)
        pieces_of[name] = pieces
        offset += piece_bytes * pieces
        address += 1 << 20
    return KVLayoutPlanner(regions), caches, pieces_of


@given(layouts(), st.integers(0, 50))
def test_the_ranges_of_a_block_cover_its_object_once_and_no_other_block(
    layout: tuple[KVLayoutPlanner, dict[str, Cache], dict[str, int]], block_id: int
) -> None:
    planner, caches, pieces_of = layout
    planner.register_kv_caches(caches)
    ranges = planner.plan_registered_block("k", block_id).ranges
    covered = [byte for r in ranges for byte in range(r.object_offset, r.object_offset + r.length)]
    assert covered == list(range(planner.object_size))
    after = planner.plan_registered_block("k", block_id + 1).ranges
    mine = {byte for r in ranges for byte in range(r.base_address, r.base_address + r.length)}
    theirs = {byte for r in after for byte in range(r.base_address, r.base_address + r.length)}
    assert len(mine) == planner.object_size
    assert not mine & theirs
    for name, pieces in pieces_of.items():
        assert sum(r.layer_name == name for r in ranges) == pieces


@given(layouts())
def test_each_group_s_ranges_are_an_object_of_their_own(
    layout: tuple[KVLayoutPlanner, dict[str, Cache], dict[str, int]],
) -> None:
    planner, caches, _ = layout
    planner.register_kv_caches(caches)
    whole = planner.plan_registered_block("k", 3).ranges
    for group_id in {region.group_id for region in planner.regions}:
        ranges = planner.plan_registered_block("k", 3, group_id=group_id).ranges
        assert [r[:6] for r in ranges] == [r[:6] for r in whole if r.group_id == group_id]
        covered = [byte for r in ranges for byte in range(r.object_offset, r.object_offset + r.length)]
        assert covered == list(range(len(covered)))


tables = st.lists(st.integers(0, 5), max_size=5)


@given(st.lists(tables, max_size=6))
def test_a_table_only_grows_between_replacements(updates: list[list[int]]) -> None:
    tracker = RequestTracker()
    known: list[int] | None = None
    for table in updates:
        tracker.update_blocks([table])
        after = tracker.block_ids[0]
        if known is None:
            assert after == table
        else:
            assert after[: len(known)] == known
            added = after[len(known) :]
            assert added in ([], table, table[len(known) :])
            assert after[len(after) - len(table) :] == table
        known = list(after)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 32)), max_size=8))
def test_the_saved_mark_never_goes_back_or_beyond(marks: list[tuple[int, int]]) -> None:
    tracker = RequestTracker()
    highest = 0
    for tokens, block_size in marks:
        highest = max(highest, tokens - tokens % block_size)
        assert tracker.mark_saved(tokens, block_size) == tracker.saved_tokens == highest


steps = st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from("abcd"), min_size=1)), max_size=6)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6), steps)
def test_a_job_ends_when_every_key_has_an_outcome(
    keys: list[str], steps: list[tuple[bool, set[str]]]
) -> None:
    count = len(keys)
    job = TransferJobState(
        BlockLoadBatch(keys, range(count), [0] * count, "r"), plan_bytes=[2**n for n in range(count)]
    )
    job.start()
    good: set[str] = set()
    bad: set[str] = set()
    for has_moved, named in steps:
        some = named & set(keys)
        if not some:
            continue
        if has_moved:
            good |= some
            job.complete(some)
        else:
            bad |= some
            job.fail(some, "because")
        assert job.status.is_final == (good | bad == set(keys))
    if job.status.is_final:
        assert job.status == ("failed" if bad else "completed")
    assert job.completed_bytes == sum(2**n for n, key in enumerate(keys) if key in good)
    assert job.failed_block_ids == {n for n, key in enumerate(keys) if key in bad}
