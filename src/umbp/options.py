"""Every option of UMBP, once: `Options` is the table, and `parse_options` the only reader of a user's input.

An option is a field of `Options` whose metadata is its `Option` row: kind (type, unit, range), the modes in
which it has an effect, and its meaning. The parser, the log line and README's table, which
`python -m umbp.options` prints, are made from these rows.

The rules are strict, since a wrong option that passes shows itself much later, as a slow engine:
- An unknown name is an error that gives the nearest right one; so is an option without effect in the mode.
- Flags are JSON's `true` and `false`: `"true"`, `1` and `0` are errors, and so are `true` for a number, `2.0`
  for a whole number, a number in quotes, and NaN.
- A size is a whole number of bytes, or text with a unit written exactly (`64GiB`, `512 MiB`, `10GB`): KiB MiB
  GiB TiB PiB count by 1024, KB MB GB TB PB by 1000; `64G` and `64gb` are errors. Fractions of a byte are
  dropped. From one page to 1 PiB: more is a slip.
- `null` is an error: whoever wants the default leaves the option out.
- A mode that there isn't is told first, then what this version doesn't have yet, and then all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from umbp.errors import ConfigError
from umbp.kinds import (
    PAGE_BYTES,
    Choice,
    Flag,
    Kind,
    Share,
    Size,
    Table,
    Text,
    Whole,
    format_size,
    nearest,
    shown,
)
from umbp.plugins import Choices

MODES = Choices(
    what="mode",
    group="umbp.runtimes",
    built_in={
        "embedded": ("umbp.runtime.embedded", "EmbeddedRuntime"),
        "standalone": ("umbp.runtime.standalone", "StandaloneRuntime"),
        "distributed": ("umbp.runtime.distributed", "DistributedRuntime"),
    },
)
BUILT_IN_MODES = tuple(MODES.built_in)
SHARED_MODES = ("standalone", "distributed")
PLUG_IN = "plug-in"
"""Stands for every mode that is not built in, in `Option.modes`."""

LATER_OPTIONS = ("ssd_path", "ssd_capacity_bytes")
"""The options that this version doesn't have yet."""

EVICTION_POLICIES = ("lru", "hazard")
DEFAULT_EVICTION_POLICY = "hazard"
"""The better one on recorded requests; docs/design.md has the figures."""

DEFAULT_SHARE = 4
"""Where no capacity is given, one part in so many of the free memory is taken."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table; `default` is said in words where the field's own value doesn't tell."""

    kind: Kind
    meaning: str
    modes: tuple[str, ...] = (*BUILT_IN_MODES, PLUG_IN)
    default: str = ""
    excludes: str | None = None
    needs: str | None = None
    required_in: str | None = None


_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_NAME = Text("a name of at most 64 letters, digits, '.', '_' and '-'", _WORD)
_FOLDER = Text("an absolute path", r"/.*")


def _option(value: Any, kind: Kind, meaning: str, **row: Any) -> Any:
    """A field of `Options` with its row in the table."""
    metadata = {"option": Option(kind, meaning, **row)}
    if isinstance(value, dict):
        return field(default_factory=dict, metadata=metadata, hash=False)
    return field(default=value, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user chose, checked, with the defaults filled in. Made by `parse_options`.

    `None` means that the value is found at start (free memory, a measurement, "auto") or that the tier isn't
    there. Mappings are private copies: read them, don't change them.
    """

    mode: str = _option(
        "embedded",
        Text("embedded, standalone, distributed or a plug-in's name", _WORD),
        "where the pool lives: with the engine, in a file that the node's engines share, on a cluster",
    )
    capacity_bytes: int | None = _option(
        None,
        Size(),
        "pool memory of each worker; standalone: of the shared pool, should this engine have to make it",
        default="a quarter of what the cgroup leaves free, split over the host's workers; standalone: none, "
        "the pool must be there",
        excludes="total_capacity_bytes",
    )
    total_capacity_bytes: int | None = _option(
        None,
        Size(),
        "pool memory of the engine, split over its workers; standalone: as `capacity_bytes`",
        excludes="capacity_bytes",
    )
    key_namespace: str | None = _option(
        None,
        Text("printable text of at most 200 characters, 200 bytes in UTF-8", word="auto", most_bytes=200),
        "separates pools whose bytes must never meet; your own value is used as it is, you answer for it",
        default='"auto"',
    )
    enable_lookup: bool = _option(True, Flag(), "restore what is stored; false: only store")
    load_async: bool = _option(True, Flag(), "load while the engine goes on with other requests")
    save_decode_cache: bool = _option(False, Flag(), "store blocks of generated tokens as well")
    lookup_async: bool = _option(
        False,
        Flag(),
        "ask the store beside the scheduler's steps, not in them",
        modes=("distributed", PLUG_IN),
        default="true (plug-ins: false)",
    )
    lookup_timeout_ms: int = _option(
        200,
        Whole(1, 60_000, "ms"),
        "a lookup that takes longer is a miss; nor does a request wait longer for what another engine stores",
    )
    min_load_tokens: int | None = _option(
        None,
        Whole(0, 2**31 - 1, "tokens", word="measured"),
        "a shorter hit isn't worth loading",
        default='"measured"',
    )
    num_workers: int = _option(2, Whole(1, 64, "threads"), "copy threads of each worker")
    timeout_ms: int = _option(30_000, Whole(1, 3_600_000, "ms"), "a transfer older than this has failed")
    write_policy: str = _option(
        "through",
        Choice(("through", "lazy")),
        "store a block when it has been computed, or when the engine is about to evict it",
    )
    eviction_policy: str = _option(
        DEFAULT_EVICTION_POLICY,
        Choice(EVICTION_POLICIES),
        "what leaves a full pool first: the oldest, or what is least likely to be asked for again",
        modes=BUILT_IN_MODES,
    )
    dram_high_watermark: float = _option(
        1.0, Share(), "share of the pool in use where eviction starts", modes=BUILT_IN_MODES
    )
    dram_low_watermark: float = _option(
        0.95,
        Share(),
        "and where it stops; not above the high one",
        modes=BUILT_IN_MODES,
        default="0.95 of the high one",
    )
    dram_use_hugepages: bool | None = _option(
        None,
        Flag(auto=True),
        "back the pool with huge pages; falls back with one warning",
        modes=BUILT_IN_MODES,
        default='"auto"',
    )
    dram_numa_node: int = _option(
        -1, Whole(-1, 1023, ""), "memory node of the pool; -1: the worker's own", modes=BUILT_IN_MODES
    )
    dram_prefault: bool | None = _option(
        None,
        Flag(auto=True),
        "map all of the pool's pages at the start; auto: in the background after it; false: at first use",
        modes=BUILT_IN_MODES,
        default='"auto"',
    )
    verify: str = _option(
        "far",
        Choice(("far", "always", "off")),
        "checksums on what leaves DRAM, on everything, on nothing",
        modes=BUILT_IN_MODES,
    )
    pool: str | None = _option(
        None,
        _NAME,
        "name of the node's shared pool; distributed: without it each worker has a pool of its own",
        modes=SHARED_MODES,
        required_in="standalone",
    )
    pool_dir: str = _option("/dev/shm", _FOLDER, "folder of the pool's file", modes=SHARED_MODES)
    namespace_quota: float = _option(
        1.0, Share(), "share of the shared pool that one namespace may fill", modes=SHARED_MODES
    )
    store: str | None = _option(
        None,
        _NAME,
        'cluster store: "mooncake", "redis", ...',
        modes=("distributed",),
        required_in="distributed",
    )
    store_options: Mapping[str, object] = _option(
        {}, Table(), "settings that the store reads", modes=("distributed",), default="{}"
    )
    ssd_path: str | None = _option(
        None, _FOLDER, "folder of the SSD tier", modes=BUILT_IN_MODES, needs="ssd_capacity_bytes"
    )
    ssd_capacity_bytes: int | None = _option(
        None, Size(), "hard limit of the SSD tier, per worker", modes=BUILT_IN_MODES, needs="ssd_path"
    )
    plugin_options: Mapping[str, object] = _option(
        {}, Table(), "settings that a plug-in reads", modes=(PLUG_IN,), default="{}"
    )
    given: frozenset[str] = frozenset()
    """The names that the user wrote; not an option itself."""

    @property
    def is_built_in(self) -> bool:
        return self.mode in BUILT_IN_MODES

    def worker_capacity(self, free_bytes: int, workers: int) -> int:
        """Pool bytes of each of the `workers` on this host, of whose memory `free_bytes` are free.

        Says what was asked for, or the default; whether that much is free is for the pool to check.
        """
        if self.capacity_bytes is not None:
            return self.capacity_bytes
        if self.total_capacity_bytes is None:
            return capacity_per_worker(free_bytes, workers)
        share = self.total_capacity_bytes // workers // PAGE_BYTES * PAGE_BYTES
        if share == 0:
            raise ConfigError(
                f"option 'total_capacity_bytes' leaves each of {workers} workers less than a page; "
                f"write at least {format_size(workers * PAGE_BYTES)}"
            )
        return share

    def effective(self) -> dict[str, object]:
        """Every option that has an effect in this mode, by name, in the table's order."""
        return {name: getattr(self, name) for name in OPTIONS if self._has_effect(name)}

    def _has_effect(self, name: str) -> bool:
        rival = OPTIONS[name].excludes
        is_displaced = rival is not None and getattr(self, rival) is not None
        return applies(name, self.mode) and name not in LATER_OPTIONS and not is_displaced

    def entries(self) -> list[str]:
        """The effective options as `name=value`; of nested settings only the names: they may be secrets."""
        return [f"{name}={_effective_text(name, value)}" for name, value in self.effective().items()]

    def describe(
        self, worker_bytes: int | None = None, workers: int = 1, host_workers: int | None = None
    ) -> str:
        """One line for the log: the effective options, and the pool's size per worker, engine and host."""
        line = ", ".join(self.entries())
        if worker_bytes is None:
            return line
        counts = (1, workers, workers if host_workers is None else host_workers)
        worker, engine, host = (format_size(worker_bytes * count) for count in counts)
        return f"{line}; pool: {worker} per worker, {engine} per engine of {workers}, {host} on this host"


OPTIONS: Mapping[str, Option] = {
    each.name: each.metadata["option"] for each in fields(Options) if "option" in each.metadata
}


def parse_options(extra: Mapping[str, object]) -> Options:
    """Checks `kv_connector_extra_config`; `ConfigError` of one line names the option and what to write.

    A mode that there isn't is told before all else, since which options have an effect hangs on it. What
    `plugin_options` holds is for the plug-in to check.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(f"kv_connector_extra_config must be a JSON object, not {shown(extra)}")
    mode = str(_parse("mode", extra.get("mode", "embedded")))
    MODES.require(mode)
    _require_built(extra)
    for name in extra:
        if name not in OPTIONS:
            raise ConfigError(f"unknown option {shown(name)}{nearest(name, OPTIONS)}")
    values: dict[str, Any] = {"lookup_async": mode == "distributed"}
    for name, value in extra.items():
        if not applies(name, mode):
            raise ConfigError(_without_effect(name, mode))
        values[name] = _parse(name, value)
    if "dram_high_watermark" in extra:
        values.setdefault("dram_low_watermark", 0.95 * values["dram_high_watermark"])
    options = Options(**values, given=frozenset(extra))
    _check_together(options)
    return options


def applies(name: str, mode: str) -> bool:
    """Whether the option has an effect in the mode."""
    return (mode if mode in BUILT_IN_MODES else PLUG_IN) in OPTIONS[name].modes


def capacity_per_worker(free_bytes: int, workers: int) -> int:
    """The default capacity: a quarter of the free memory, split evenly, in whole pages; it may come to 0."""
    if free_bytes < 0 or workers < 1:
        raise ValueError(f"need free_bytes >= 0 and workers >= 1, not {free_bytes} and {workers}")
    return free_bytes // DEFAULT_SHARE // workers // PAGE_BYTES * PAGE_BYTES


def markdown_table() -> str:
    """README's table of options."""
    lines = ["| option | values | default | modes | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, row in OPTIONS.items():
        default = row.default or _json_text(Options.__dataclass_fields__[name].default)
        modes = {4: "all", 3: "all built in"}.get(len(row.modes)) or ", ".join(row.modes)
        meaning = row.meaning
        meaning += f"; not together with `{row.excludes}`" if row.excludes else ""
        meaning += f"; needs `{row.needs}`" if row.needs else ""
        if row.required_in is not None:
            where = f"{row.required_in}: " if len(row.modes) > 1 else ""
            meaning += f"; {where}must be given"
        meaning += "; not in this version yet" if name in LATER_OPTIONS else ""
        lines.append(f"| `{name}` | {row.kind.hint()} | {default} | {modes} | {meaning} |")
    return "\n".join(lines) + "\n"


def _parse(name: str, value: object) -> object:
    try:
        return OPTIONS[name].kind.parse(value)
    except ValueError as error:
        raise ConfigError(f"option '{name}' {error}") from None


def _require_built(names: Iterable[object]) -> None:
    """`ConfigError` for what is planned but not in this version: nothing else about it is worth mending."""
    for name in names:
        if name in LATER_OPTIONS:
            raise ConfigError(f"option '{name}' is not in this version yet; leave it out")


def _check_together(options: Options) -> None:
    """The rules that hold between options."""
    for name, row in OPTIONS.items():
        if row.required_in == options.mode and name not in options.given:
            raise ConfigError(f"mode '{options.mode}' needs option '{name}': {row.kind.hint()}")
        if name not in options.given:
            continue
        if row.excludes in options.given:
            raise ConfigError(f"options '{name}' and '{row.excludes}' exclude each other; write one of them")
        if row.needs is not None and row.needs not in options.given:
            raise ConfigError(f"option '{name}' needs option '{row.needs}'")
    if options.dram_low_watermark > options.dram_high_watermark:
        raise ConfigError(
            f"option 'dram_low_watermark' must not be above 'dram_high_watermark': "
            f"{options.dram_low_watermark} and {options.dram_high_watermark}"
        )


def _without_effect(name: str, mode: str) -> str:
    return f"option '{name}' has no effect in mode '{mode}', only in {', '.join(OPTIONS[name].modes)}"


def _json_text(value: object) -> str:
    """A value as JSON writes it, an absent one as a dash."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _effective_text(name: str, value: object) -> str:
    if value is None:
        return {"capacity_bytes": "default"}.get(name, OPTIONS[name].default.strip('"') or "-")
    if isinstance(value, Mapping):
        return "{" + " ".join(sorted(shown(key).strip("'") for key in value)) + "}"
    if isinstance(value, int) and isinstance(OPTIONS[name].kind, Size):
        return format_size(value)
    return _json_text(value)


if __name__ == "__main__":
    print(markdown_table(), end="")
