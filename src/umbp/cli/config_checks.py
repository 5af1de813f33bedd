"""What `umbp doctor` says of a configuration for vLLM (`--kv-transfer-config`), before an engine reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from umbp.cli.checks import CONNECTOR_NAMES, MODULE_PATH, Check, plugin_obstacle
from umbp.errors import ConfigError
from umbp.kinds import nearest, shown
from umbp.options import OPTIONS, Options, parse_options

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

POLICIES = ("recompute", "fail")
ROLES = ("kv_both", "kv_producer", "kv_consumer")
_BYTE_ORDER_MARK = "\ufeff"


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
    elif path is None and (obstacle := plugin_obstacle()) is not None:
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
