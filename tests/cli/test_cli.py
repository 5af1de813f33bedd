"""Rules of the command line: quick, whole sentences, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import umbp

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


def test_every_listed_subcommand_has_a_help() -> None:
    from umbp.cli import _SUBCOMMANDS

    for name in _SUBCOMMANDS:
        result = run(name, "--help")
        assert result.returncode == 0, result.stderr
        assert "--json" in result.stdout


def test_an_unknown_subcommand_is_a_sentence_and_exit_code_2() -> None:
    result = run("dcotor")
    assert result.returncode == 2
    assert "dcotor" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("text", ["{", "[1]", "/nowhere/config.json", "{'kv_role': 1}", "@"])
def test_a_configuration_that_cannot_be_read_is_a_sentence_and_exit_code_2(text: str) -> None:
    result = run("doctor", text)
    assert result.returncode == 2
    assert result.stderr.startswith("umbp: ")
    assert len(result.stderr.splitlines()) == 1


def test_the_doctor_reads_a_configuration_from_a_file(tmp_path: Path) -> None:
    from umbp.cli.checks import read_transfer_config

    path = tmp_path / "config.json"
    path.write_text(json.dumps(RIGHT))
    assert read_transfer_config(str(path)) == read_transfer_config(f"@{path}") == RIGHT


def states(config: dict[str, object]) -> dict[str, str]:
    from umbp.cli.checks import check_transfer_config

    return {check.name: check.state for check in check_transfer_config(config)[0]}


def test_the_doctor_finds_nothing_in_a_right_configuration() -> None:
    assert states(RIGHT) == {"kv_connector": "ok", "options": "ok"}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"kv_connector": "UMPBStoreConnector"}, "kv_connector"),
        ({"kv_role": "kv_boht"}, "kv_role"),
        ({"kv_role": None}, "kv_role"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"kv_connector_extra_config": {"capacity": 1}}, "options"),
        ({"kv_connector_extra_config": [1]}, "options"),
        ({"kv_connector_extra_config": {"mode": "nowhere"}}, "options"),
    ],
)
def test_the_doctor_names_what_is_wrong_in_a_configuration(change: dict[str, object], where: str) -> None:
    found = states({**RIGHT, **change})
    assert [name for name, state in found.items() if state == "bad"] == [where]


def test_the_doctor_says_what_to_install_where_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from umbp.cli import checks

    monkeypatch.setattr(checks, "installed_vllm", lambda: None)
    (check,) = checks.check_vllm()
    assert check.state == "bad"
    assert "pip install vllm" in check.text


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
    assert "pip install vllm" in result.stdout
    assert "Not as it should be: 2 of" in result.stdout
