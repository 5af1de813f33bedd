"""Rules of the one parser of user input."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbp import options as options_module
from umbp.errors import ConfigError
from umbp.kinds import nearest, shown
from umbp.options import (
    LATER_OPTIONS,
    OPTIONS,
    Options,
    applies,
    capacity_per_worker,
    markdown_table,
    parse_options,
)
from umbp.testing.plugins import write_plug_in

GiB = 1024**3

RIGHT_VALUES: dict[str, Any] = {
    "mode": "embedded",
    "capacity_bytes": "1GiB",
    "total_capacity_bytes": "1GiB",
    "key_namespace": "team-a",
    "enable_lookup": False,
    "load_async": False,
    "save_decode_cache": True,
    "lookup_async": True,
    "lookup_timeout_ms": 50,
    "min_load_tokens": 64,
    "num_workers": 3,
    "timeout_ms": 1000,
    "write_policy": "lazy",
    "eviction_policy": "lru",
    "dram_high_watermark": 0.9,
    "dram_low_watermark": 0.5,
    "dram_use_hugepages": True,
    "dram_numa_node": 0,
    "dram_prefault": True,
    "verify": "always",
    "pool": "shared",
    "pool_dir": "/mnt/pools",
    "namespace_quota": 0.5,
    "store": "mooncake",
    "store_options": {"address": "127.0.0.1:1"},
    "ssd_path": "/mnt/ssd",
    "ssd_capacity_bytes": "1TiB",
    "plugin_options": {"depth": 3},
}
NEEDED = {"standalone": {"pool": "shared"}, "distributed": {"store": "mooncake"}}
COMPANIONS = {"ssd_path": "ssd_capacity_bytes", "ssd_capacity_bytes": "ssd_path"}
MODES = ("embedded", "standalone", "distributed", "of-a-plug-in")


@pytest.fixture(scope="module", autouse=True)
def plug_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modes that are installed beside the built-in ones."""
    folder = tmp_path_factory.mktemp("plug-ins")
    for mode in ("of-a-plug-in", "mine"):
        write_plug_in(folder, mode, "nowhere:make", f"umbp-test-{mode}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


@pytest.fixture
def whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if everything in the table were in this version."""
    monkeypatch.setattr(options_module, "LATER_OPTIONS", ())


def refused(extra: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_options(extra)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_no_options_are_the_defaults() -> None:
    assert parse_options({}) == Options()
    assert parse_options({"mode": "embedded"}) == replace(Options(), given=frozenset({"mode"}))


def test_every_field_is_an_option_and_the_samples_cover_them_all() -> None:
    assert {each.name for each in fields(Options)} - {"given"} == set(OPTIONS) == set(RIGHT_VALUES)


@pytest.mark.usefixtures("whole_table")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in RIGHT_VALUES if name != "mode"])
def test_an_option_is_taken_in_its_modes_and_refused_in_the_others(name: str, mode: str) -> None:
    extra = {"mode": mode, **NEEDED.get(mode, {}), name: RIGHT_VALUES[name]}
    if name in COMPANIONS:
        extra[COMPANIONS[name]] = RIGHT_VALUES[COMPANIONS[name]]
    if applies(name, mode):
        options = parse_options(extra)
        assert options.given == frozenset(extra)
        assert getattr(options, name) != Options.__dataclass_fields__[name].default
    else:
        assert f"'{name}' has no effect in mode '{mode}'" in refused(extra)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_misspelt_name_is_refused_with_the_right_one(name: str) -> None:
    middle = len(name) // 2
    dropped = name[:middle] + name[middle + 1 :]
    doubled = name[:middle] + name[middle] + name[middle:]
    shouted = name.upper()
    for wrong in (dropped, doubled, shouted):
        message = refused({wrong: RIGHT_VALUES[name]})
        assert message == f"unknown option '{wrong}'; did you mean '{name}'?"


def test_a_name_that_nothing_is_near_to_is_refused_without_advice() -> None:
    assert refused({"qqq": 1}) == "unknown option 'qqq'"
    assert refused({3: 1}) == "unknown option 3"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (4096, 4096),
        ("4096B", 4096),
        ("64GiB", 64 * GiB),
        ("512 MiB", 512 * 1024**2),
        ("10GB", 10 * 10**9),
        ("8KB", 8000),
        ("8KiB", 8192),
        ("1.5TiB", 3 * 1024**4 // 2),
        ("0.1MiB", 104857),
        ("1PiB", 1024**5),
        ("1PB", 1000**5),
    ],
)
def test_sizes_are_bytes_or_text_with_a_binary_or_decimal_unit(text: object, size_bytes: int) -> None:
    assert parse_options({"capacity_bytes": text}).capacity_bytes == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "12 parsecs", "64G", "64gb", "64GIB", "GiB", "", "64", "4096", "2PiB", "1e9B", "-1GiB", "1,5GiB",
        "64  GiB", " 64GiB", "64GiB\n", "٣GiB", "1.GiB", 0, -1, 4095, "0GiB", "2000TiB", 10**400, 1e9, 4096.0,
        True, None, [4096], {}, float("nan"), float("inf"), b"64GiB",
    ],
)  # fmt: skip
def test_what_is_not_a_size_is_refused(text: object) -> None:
    assert refused({"capacity_bytes": text}).startswith("option 'capacity_bytes' ")


@pytest.mark.parametrize("digits", ["4096", "64", "0", "9" * 20])
def test_a_number_in_quotes_is_told_to_drop_them_or_to_add_a_unit(digits: str) -> None:
    message = refused({"capacity_bytes": digits})
    assert f"has no unit in '{digits}'; drop the quotes" in message
    assert f'add a unit such as "{digits}MiB"' in message


def test_a_namespace_takes_up_to_200_printable_characters_and_says_so() -> None:
    for right in ("n" * 200, "team a", "é" * 100):
        assert parse_options({"key_namespace": right}).key_namespace == right
    for wrong in ("n" * 201, "tab\there"):
        assert "must be printable text of at most 200 characters" in refused({"key_namespace": wrong})
    assert refused({"key_namespace": "n" * 201}).endswith("of 201 characters")


@pytest.mark.parametrize("name", ["mode", "capacity_bytes", "num_workers", "verify", "load_async"])
@pytest.mark.parametrize(
    ("value", "called"),
    [
        ([1], "an array"),
        ([], "an array"),
        ({"a": 1}, "an object"),
        (None, "null"),
        (True, "true"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
    ],
)
def test_a_wrong_value_is_called_by_its_name_in_json(name: str, value: object, called: str) -> None:
    assert shown(value) == called
    if (name, value) != ("load_async", True):
        assert refused({name: value}).endswith(f", not {called}")


@pytest.mark.parametrize("word", ["UMBPConnector", "kv_both", "GiB", "K8sStore"])
def test_the_nearest_word_is_found_whatever_its_case_and_given_as_it_is_written(word: str) -> None:
    words = ("Other", "UMBPConnector", "kv_both", "GiB", "K8sStore")
    for wrong in (word.lower(), word.upper(), word.swapcase(), word + "e", word[:-1]):
        assert nearest(wrong, words) == f"; did you mean '{word}'?"
    assert nearest("zzzzzz", words) == nearest(3, words) == ""


def test_every_built_in_mode_has_a_runtime() -> None:
    for module, attribute in options_module.MODES.built_in.values():
        assert callable(getattr(import_module(module), attribute))


@pytest.mark.parametrize("name", LATER_OPTIONS)
@pytest.mark.parametrize("mode", ["embedded", "of-a-plug-in"])
@pytest.mark.parametrize("value", [None, "relative", "1GiB"])
def test_an_option_of_a_later_version_is_refused_before_its_value_or_companion(
    name: str, mode: str, value: object
) -> None:
    message = refused({"capcity_bytes": 1, "mode": mode, name: value})
    assert message == f"option '{name}' is not in this version yet; leave it out"


@pytest.mark.parametrize("name", ["capacity_bytes", "total_capacity_bytes"])
def test_of_two_that_exclude_each_other_only_the_one_that_counts_is_effective(name: str) -> None:
    options = parse_options({name: "1GiB"})
    rival = OPTIONS[name].excludes
    assert name in options.effective()
    assert rival not in options.effective()
    assert [entry for entry in options.entries() if "capacity" in entry] == [f"{name}=1 GiB"]


def test_what_is_not_in_this_version_is_not_among_the_effective_options() -> None:
    assert not set(Options().effective()) & set(LATER_OPTIONS)


def test_an_unknown_unit_is_named_and_a_near_one_offered() -> None:
    assert "has no unit 'parsecs' in '12 parsecs'; write B, KiB" in refused({"capacity_bytes": "12 parsecs"})
    assert refused({"capacity_bytes": "64G"}).endswith("write GiB")
    assert refused({"capacity_bytes": "64gb"}).endswith("write GB")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_lookup", 1),
        ("enable_lookup", 0),
        ("enable_lookup", "true"),
        ("enable_lookup", None),
        ("num_workers", True),
        ("num_workers", 0),
        ("num_workers", -1),
        ("num_workers", 65),
        ("num_workers", 2.0),
        ("num_workers", "2"),
        ("timeout_ms", 0),
        ("lookup_timeout_ms", 60_001),
        ("min_load_tokens", -1),
        ("min_load_tokens", "auto"),
        ("dram_high_watermark", 0),
        ("dram_high_watermark", 1.01),
        ("dram_high_watermark", -0.5),
        ("dram_high_watermark", float("nan")),
        ("dram_high_watermark", float("inf")),
        ("dram_high_watermark", True),
        ("dram_high_watermark", "0.9"),
        ("dram_use_hugepages", "yes"),
        ("dram_use_hugepages", 1),
        ("dram_numa_node", -2),
        ("verify", "Far"),
        ("write_policy", ["through"]),
        ("key_namespace", ""),
        ("key_namespace", "  "),
        ("key_namespace", "two\nlines"),
        ("key_namespace", 7),
        ("key_namespace", "n" * 201),
        ("key_namespace", "é" * 101),
        ("key_namespace", "a\u200bb"),
        ("key_namespace", "\ud800"),
        ("mode", ""),
        ("mode", None),
        ("mode", "../x"),
        ("pool_dir", "relative/path"),
        ("pool_dir", "/with\0zero"),
    ],
)
@pytest.mark.usefixtures("whole_table")
def test_a_value_of_the_wrong_kind_or_range_is_refused_by_the_options_name(name: str, value: object) -> None:
    companions = {"mode": "standalone", "pool": "shared"} if name == "pool_dir" else {}
    assert refused({**companions, name: value}).startswith(f"option '{name}' must be ")


def test_words_that_stand_for_the_default_are_taken() -> None:
    words = {
        "key_namespace": "auto",
        "min_load_tokens": "measured",
        "dram_use_hugepages": "auto",
        "dram_prefault": "auto",
    }
    options = parse_options(words)
    assert [getattr(options, name) for name in words] == [None] * len(words)


def test_a_misspelt_choice_is_refused_with_the_right_one() -> None:
    assert refused({"verify": "alway"}).endswith("did you mean 'always'?")


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"store": "mooncake"},
        {"store": "mooncake", "store_options": {}},
        {"store": 3},
        {"stor": "mooncake"},
        {"capacity_bytes": "much"},
        {"ssd_path": "/mnt/ssd"},
        {"dram_low_watermark": 0.9, "dram_high_watermark": 0.5},
    ],
)
def test_a_mode_that_there_is_not_is_told_before_all_else_and_alone(beside: dict[str, object]) -> None:
    for extra in ({"mode": "distribted", **beside}, {**beside, "mode": "distribted"}):
        told, _, known = refused(extra).partition(" known here: ")
        assert told == "unknown mode 'distribted'; did you mean 'distributed'?"
        # Others may be installed here.
        assert set(known.split(", ")) >= {"embedded", "standalone", "distributed", "mine", "of-a-plug-in"}
    assert refused({"mode": "zzz", **beside}).startswith("unknown mode 'zzz'; known here: ")
    assert refused({"mode": "of-a-plugin", **beside}).startswith(
        "unknown mode 'of-a-plugin'; did you mean 'of-a-plug-in'?"
    )


def test_two_capacities_exclude_each_other() -> None:
    both = {"capacity_bytes": "1GiB", "total_capacity_bytes": "2GiB"}
    assert "'capacity_bytes' and 'total_capacity_bytes' exclude each other" in refused(both)


@pytest.mark.usefixtures("whole_table")
def test_the_ssd_tier_needs_both_of_its_options() -> None:
    assert refused({"ssd_path": "/mnt/ssd"}) == "option 'ssd_path' needs option 'ssd_capacity_bytes'"
    assert refused({"ssd_capacity_bytes": "1GiB"}) == "option 'ssd_capacity_bytes' needs option 'ssd_path'"


@pytest.mark.usefixtures("whole_table")
@pytest.mark.parametrize(("mode", "name"), [("standalone", "pool"), ("distributed", "store")])
def test_a_mode_names_the_option_that_it_needs(mode: str, name: str) -> None:
    assert f"mode '{mode}' needs option '{name}'" in refused({"mode": mode})


def test_the_low_watermark_is_not_above_the_high_one_and_follows_it() -> None:
    assert "'dram_low_watermark' must not be above" in refused(
        {"dram_high_watermark": 0.5, "dram_low_watermark": 0.6}
    )
    assert parse_options({"dram_high_watermark": 0.5}).dram_low_watermark == pytest.approx(0.475)
    assert parse_options({"dram_high_watermark": 0.5, "dram_low_watermark": 0.5}).dram_low_watermark == 0.5
    assert parse_options({"dram_low_watermark": 0.99}).dram_high_watermark == 1.0


@pytest.mark.usefixtures("whole_table")
def test_lookups_are_asynchronous_by_default_in_distributed_mode_alone() -> None:
    assert not parse_options({}).lookup_async
    assert parse_options({"mode": "distributed", "store": "mooncake"}).lookup_async
    assert not parse_options({"mode": "distributed", "store": "mooncake", "lookup_async": False}).lookup_async


def test_a_mode_that_is_not_built_in_gets_its_own_options_as_they_are() -> None:
    nested = {"tiers": [{"depth": 3}]}
    options = parse_options({"mode": "mine", "plugin_options": nested})
    nested["tiers"][0]["depth"] = 4
    assert options.plugin_options == {"tiers": [{"depth": 3}]}
    assert not options.is_built_in


@pytest.mark.usefixtures("whole_table")
def test_options_are_values() -> None:
    options = parse_options({"mode": "distributed", "store": "mooncake", "store_options": {"a": [1]}})
    with pytest.raises(FrozenInstanceError):
        options.mode = "embedded"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options) == hash(replace(options))


def test_only_a_mapping_is_parsed() -> None:
    for wrong in (None, [], "mode", 3):
        assert "must be a JSON object" in refused(wrong)


def test_the_default_capacity_is_a_quarter_of_what_is_free_split_in_whole_pages() -> None:
    assert capacity_per_worker(64 * GiB, 1) == 16 * GiB
    assert capacity_per_worker(64 * GiB, 4) == 4 * GiB
    assert capacity_per_worker(64 * GiB, 3) % 4096 == 0
    assert capacity_per_worker(4095, 1) == 0
    for free_bytes, workers in ((-1, 1), (1, 0)):
        with pytest.raises(ValueError, match="need free_bytes"):
            capacity_per_worker(free_bytes, workers)


@given(free_bytes=st.integers(0, 2**50), workers=st.integers(1, 64))
def test_the_default_capacities_of_all_workers_stay_within_a_quarter(free_bytes: int, workers: int) -> None:
    assert capacity_per_worker(free_bytes, workers) * workers <= free_bytes // 4


def test_the_capacity_of_a_worker_is_what_was_asked_for() -> None:
    assert parse_options({"capacity_bytes": "1GiB"}).worker_capacity(64 * GiB, 2) == GiB
    assert parse_options({"total_capacity_bytes": "1GiB"}).worker_capacity(64 * GiB, 2) == GiB // 2
    assert parse_options({}).worker_capacity(64 * GiB, 2) == 8 * GiB
    with pytest.raises(ConfigError, match="write at least 8 KiB"):
        parse_options({"total_capacity_bytes": 4096}).worker_capacity(64 * GiB, 2)


def test_the_log_line_is_one_line_with_sizes_per_worker_engine_and_host() -> None:
    line = parse_options({"capacity_bytes": "64GiB"}).describe(64 * GiB, workers=2, host_workers=4)
    assert "\n" not in line
    assert "capacity_bytes=64 GiB" in line
    assert "min_load_tokens=measured" in line
    assert "pool_dir" not in line
    assert line.endswith("; pool: 64 GiB per worker, 128 GiB per engine of 2, 256 GiB on this host")


@pytest.mark.usefixtures("whole_table")
def test_the_log_line_keeps_secrets() -> None:
    options = parse_options(
        {"mode": "distributed", "store": "redis", "store_options": {"password": "hunter2"}}
    )
    assert "password" in options.describe()
    assert "hunter2" not in options.describe()


def test_the_table_has_a_row_for_each_option() -> None:
    rows = markdown_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(OPTIONS)
    assert all(row.count(" | ") == 4 for row in rows)
    later = {name for name, row in zip(OPTIONS, rows, strict=True) if "not in this version yet" in row}
    assert later == set(LATER_OPTIONS)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(list(OPTIONS)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from(list(OPTIONS)) | st.text(max_size=20) | st.integers()
RIGHT_PAIRS = st.sampled_from(sorted(RIGHT_VALUES)).map(lambda name: (name, RIGHT_VALUES[name]))


@given(
    extra=st.dictionaries(NAMES, JSON_VALUES, max_size=4),
    right=st.lists(RIGHT_PAIRS, max_size=6),
    mode=st.sampled_from(MODES),
)
def test_any_mapping_parses_or_is_refused_in_one_line(
    extra: dict[Any, Any], right: list[tuple[str, Any]], mode: str
) -> None:
    mapping = {"mode": mode, **extra, **dict(right)}
    before = repr(mapping)
    try:
        options = parse_options(mapping)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 400
    else:
        assert len(options.describe(GiB, workers=2).splitlines()) == 1
        assert options.given == frozenset(mapping)
    assert repr(mapping) == before


REASONS = ("has no effect in mode", "needs option", "exclude", "not in this version yet")


@given(right=st.dictionaries(st.sampled_from(sorted(RIGHT_VALUES)), st.none(), max_size=12))
def test_right_values_are_refused_only_for_the_mode_the_version_a_need_or_an_exclusion(
    right: dict[str, None],
) -> None:
    try:
        parse_options({name: RIGHT_VALUES[name] for name in right})
    except ConfigError as error:
        assert any(reason in str(error) for reason in REASONS)
