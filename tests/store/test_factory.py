"""A store is a built-in one, a plug-in's, or one sentence that says what to write instead."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from umbp.errors import ConfigError
from umbp.options import Options
from umbp.store.base import ClusterStore, StoreError
from umbp.store.factory import STORES, create_store
from umbp.store.mooncake_settings import MooncakeSettings, read_mooncake_settings
from umbp.store.redis import RedisSettings
from umbp.store.settings import markdown_table, read_settings, rows_of
from umbp.testing.plugins import write_plug_in

PLUG_IN_CODE = """
from umbp.errors import ConfigError
from umbp.testing.stores.memory import MemoryCluster
made = []
def make(options, *, serves_memory):
    made.append((options, serves_memory))
    return MemoryCluster().connect()
def falls(options, *, serves_memory):
    raise ZeroDivisionError("oh")
def refuses(options, *, serves_memory):
    raise ConfigError("no attic here")
def answers_nothing(options, *, serves_memory):
    return None
def boasts(options, *, serves_memory):
    return MemoryCluster(traits={"name": "all"}).connect()
"""

SETTINGS: dict[str, type] = {"mooncake": MooncakeSettings, "redis": RedisSettings}

RIGHT_VALUES: dict[str, dict[str, Any]] = {
    "mooncake": {
        "master": "10.0.0.1:50051",
        "protocol": "rdma",
        "device": "mlx5_0,mlx5_1",
        "segment_bytes": "4GiB",
        "buffer_bytes": "64MiB",
        "local_hostname": "node-7",
        "metadata": "http://10.0.0.1:8080/metadata",
        "timeout_ms": 3000,
    },
    "redis": {
        "host": "cache.example",
        "port": 6380,
        "database": 2,
        "username": "umbp",
        "password_variable": "CACHE_PASSWORD",
        "tls": True,
        "tls_ca_file": "/etc/ca.pem",
        "connect_timeout_ms": 300,
        "timeout_ms": 500,
    },
}


def options_of(store: str, **settings: object) -> Options:
    return Options(mode="distributed", store=store, store_options=settings)


def refusal(store: str, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        create_store(options_of(store, **settings), serves_memory=False)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on `sys.path` whose module has one callable of each kind."""
    (tmp_path / "umbp_test_attic.py").write_text(PLUG_IN_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def offer(folder: Path, name: str, callable_name: str, distribution: str = "umbp-test-plugin") -> None:
    write_plug_in(folder, name, f"umbp_test_attic:{callable_name}", distribution, STORES.group)


def test_a_plug_in_is_found_by_its_name_and_given_the_options(plug_ins: Path) -> None:
    offer(plug_ins, "attic", "make")
    options = options_of("attic", depth=3)
    assert isinstance(create_store(options, serves_memory=True), ClusterStore)
    from umbp_test_attic import made  # type: ignore[import-not-found]

    assert made == [(options, True)]
    assert "attic" in STORES.plug_ins()


def test_a_misspelt_store_is_answered_with_the_nearest_one_and_the_list(plug_ins: Path) -> None:
    offer(plug_ins, "attic", "make")
    assert "did you mean 'attic'" in refusal("atic")
    text = refusal("moncake")
    assert "did you mean 'mooncake'" in text
    assert "redis" in text


def test_a_built_in_name_cannot_be_taken(plug_ins: Path) -> None:
    offer(plug_ins, "redis", "make")
    assert "redis" not in STORES.plug_ins()
    assert "has no option 'depth'" in refusal("redis", depth=3)


def test_two_plug_ins_of_one_name_are_refused_by_their_origins(plug_ins: Path) -> None:
    offer(plug_ins, "attic", "make")
    offer(plug_ins, "attic", "falls", "umbp-other-plugin")
    text = refusal("attic")
    assert "umbp-other-plugin" in text
    assert "umbp-test-plugin" in text


@pytest.mark.parametrize(
    ("callable_name", "words"),
    [
        ("falls", "ZeroDivisionError: oh"),
        ("refuses", "no attic here"),
        ("answers_nothing", "returned a NoneType"),
        ("boasts", "traits are a dict"),
        ("is_not_there", "AttributeError"),
    ],
)
def test_a_plug_in_that_fails_is_one_sentence(plug_ins: Path, callable_name: str, words: str) -> None:
    offer(plug_ins, "attic", callable_name)
    assert words in refusal("attic")


@pytest.mark.parametrize("store", STORES.built_in)
def test_every_setting_is_read_and_none_is_untested(store: str) -> None:
    given = RIGHT_VALUES[store]
    read: object = read_settings(SETTINGS[store], store, given)
    assert set(rows_of(SETTINGS[store])) - set(given) == ({"url"} if store == "redis" else set())
    for name, value in given.items():
        expected = {"4GiB": 4 << 30, "64MiB": 64 << 20}.get(value, value) if isinstance(value, str) else value
        assert getattr(read, name) == expected


@pytest.mark.parametrize("store", STORES.built_in)
def test_an_unknown_setting_is_answered_with_the_nearest_right_one(store: str) -> None:
    assert "did you mean 'timeout_ms'" in refusal(store, timeout=3)
    assert "there are " in refusal(store, zzz=1)


@pytest.mark.parametrize(
    ("store", "settings", "words"),
    [
        ("mooncake", {}, "needs 'master' (host:port)"),
        ("mooncake", {"master": "localhost"}, "must be host:port, not 'localhost'"),
        ("mooncake", {"master": "a:1", "protocol": "roce"}, "must be tcp or rdma"),
        ("mooncake", {"master": "a:1", "segment_bytes": "4G"}, "has no unit 'G'"),
        ("mooncake", {"master": "a:1", "segment_bytes": None}, "not null"),
        ("mooncake", {"master": "a:1", "device": "mlx5_0"}, "no effect without protocol 'rdma'"),
        ("mooncake", {"master": "a:1", "timeout_ms": True}, "must be a whole number"),
        ("mooncake", {"master": "a:99999"}, "must have a port from 1 to 65535, not 'a:99999'"),
        ("mooncake", {"master": "a:0"}, "must have a port from 1 to 65535"),
        ("mooncake", {"master": "a:1", "segment_bytes": "4MiB"}, "must be 0 or at least 16 MiB, not 4 MiB"),
        ("mooncake", {"master": "a:1", "metadata": "P2PHANDSHAK"}, "must be P2PHANDSHAKE, or an URL"),
        ("mooncake", {"master": "a:1", "metadata": "10.0.0.1:2379"}, "must be P2PHANDSHAKE, or an URL"),
        ("mooncake", {"master": "a:1", "metadata": "http:///metadata"}, "must be P2PHANDSHAKE, or an URL"),
        ("redis", {"url": "redis://a", "host": "b"}, "exclude each other"),
        ("redis", {"url": "redis://a", "port": 7}, "no effect beside 'url'"),
        ("redis", {"url": "http://a"}, "must be an URL: redis://"),
        ("redis", {"url": "redis://me:secret@a"}, "UMBP_REDIS_PASSWORD"),
        ("redis", {"url": "redis://a/0?socket_timeout=9"}, "nothing behind '?' but db=NUMBER"),
        ("redis", {"url": "redis://a:70000"}, "must have a port from 1 to 65535"),
        ("redis", {"url": "redis://a:port"}, "must have a port from 1 to 65535"),
        ("redis", {"url": "redis://a/first"}, "the number of a database, not 'first'"),
        ("redis", {"tls_ca_file": "/ca.pem"}, "no effect without 'tls'"),
        ("redis", {"tls_ca_file": "/nowhere/ca.pem", "tls": True}, "can't be read: /nowhere/ca.pem (No such"),
        ("redis", {"tls_ca_file": "/etc/passwd", "tls": True}, "/etc/passwd (it holds no certificate); give"),
        ("redis", {"url": "redis://[::1"}, "is no URL: 'redis://[::1'"),
        ("redis", {"port": 70000}, "from 1 to 65535"),
    ],
)
def test_a_wrong_setting_is_one_sentence_that_says_what_to_write(
    store: str, settings: Mapping[str, Any], words: str
) -> None:
    text = refusal(store, **settings)
    assert words in text
    assert "secret" not in text


def test_rdma_without_its_devices_is_refused_though_mooncake_would_go_over_tcp(tmp_path: Path) -> None:
    def read(devices: Path, **more: str) -> MooncakeSettings:
        return read_mooncake_settings({"master": "a:1", "protocol": "rdma", **more}, str(devices))

    for devices in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"this host shows none.*write 'tcp'"):
            read(devices)
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    assert read(tmp_path).protocol == "rdma"
    assert read(tmp_path, device="mlx5_1,mlx5_0").device == "mlx5_1,mlx5_0"
    with pytest.raises(ConfigError, match=r"'mlx_0'; did you mean 'mlx5_0'.*mlx5_0, mlx5_1"):
        read(tmp_path, device="mlx5_1,mlx_0")


@pytest.mark.parametrize(("store", "module"), [("mooncake", "mooncake"), ("redis", "redis")])
def test_a_missing_library_is_one_sentence_that_says_what_to_install(
    store: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest)
    )
    assert f"pip install 'umbp[{store}]'" in refusal(
        store, **({"master": "a:1"} if store == "mooncake" else {})
    )


def test_a_missing_system_library_is_named_with_debians_packages(tmp_path: Path) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from umbp.store.mooncake_client import require_library; require_library()"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert "libibverbs.so.1" in told
    assert "apt-get install libibverbs1 libnuma1 libcurl4" in told


@pytest.mark.parametrize("store", STORES.built_in)
def test_nobody_there_is_one_sentence_when_the_store_is_opened(store: str, closed_port: int) -> None:
    pytest.importorskip(store, reason=f"the package of {store} isn't installed: run `make setup`")
    where = {"mooncake": {"master": f"127.0.0.1:{closed_port}"}, "redis": {"port": closed_port}}[store]
    opened = create_store(options_of(store, **where), serves_memory=False)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=f"answers at 127.0.0.1:{closed_port}"):
        opened.open()
    opened.close()


@pytest.mark.parametrize("host", ["..", "a" * 100 + ".example"])
@pytest.mark.parametrize("store", STORES.built_in)
def test_a_host_that_there_can_not_be_is_one_sentence_when_the_store_is_opened(store: str, host: str) -> None:
    pytest.importorskip(store, reason=f"the package of {store} isn't installed: run `make setup`")
    where = {"mooncake": {"master": f"{host}:1"}, "redis": {"host": host}}[store]
    opened = create_store(options_of(store, **where), serves_memory=False)  # type: ignore[arg-type]
    with pytest.raises((StoreError, ConfigError), match=r"can't be found|names no host"):
        opened.open()
    opened.close()


@pytest.mark.parametrize("store", STORES.built_in)
def test_the_table_of_the_documentation_is_the_current_one(store: str, project_root: Path) -> None:
    text = (project_root / "docs" / "stores.md").read_text()
    assert markdown_table(SETTINGS[store]) in text
