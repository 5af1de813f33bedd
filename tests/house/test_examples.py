"""The manifests and units under examples/ agree with each other and with the programs that they start."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from umbp.cli import cli
from umbp.cli.config_checks import check_transfer_config
from umbp.cli.lazy import LazyGroup
from umbp.testing.stores import servers

MASTER = "mooncake-master.kv.svc:50051"
OF_THE_CLUSTER = {"kv-cluster": "main"}


@pytest.fixture(scope="module")
def folder(project_root: Path) -> Path:
    return project_root / "examples" / "distributed"


@pytest.fixture(scope="module")
def manifests(folder: Path) -> dict[tuple[str, str], Any]:
    documents = [
        each
        for path in sorted(folder.glob("kubernetes/*.yaml"))
        for each in yaml.safe_load_all(path.read_text())
    ]
    assert all({"apiVersion", "kind", "metadata"} <= each.keys() for each in documents)
    assert {each["metadata"]["namespace"] for each in documents} == {"kv"}
    named = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(named) == len(documents)
    return named


def containers(workload: Any) -> list[Any]:
    pod = workload["spec"]["template"]["spec"]
    return [*pod.get("initContainers", ()), *pod["containers"]]


WORKLOADS = [("Deployment", "mooncake-master"), ("DaemonSet", "umbp-store-node"), ("Deployment", "vllm")]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_selects_its_own_pods_and_they_are_inside_the_fence(
    manifests: dict[tuple[str, str], Any], name: tuple[str, str]
) -> None:
    spec = manifests[name]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    fence = manifests["NetworkPolicy", "kv-cluster"]["spec"]
    assert fence["podSelector"]["matchLabels"] == OF_THE_CLUSTER
    assert labels.items() >= OF_THE_CLUSTER.items()
    assert fence["ingress"] == [{"from": [{"podSelector": {"matchLabels": OF_THE_CLUSTER}}]}]


def test_the_service_leads_to_the_masters_ports(manifests: dict[tuple[str, str], Any]) -> None:
    service = manifests["Service", "mooncake-master"]
    (master,) = containers(manifests["Deployment", "mooncake-master"])
    ports = {each["name"]: each["containerPort"] for each in master["ports"]}
    assert {each["targetPort"]: each["port"] for each in service["spec"]["ports"]} == ports
    assert f"--rpc_port={ports['rpc']}" in master["command"]
    assert f"--metrics_port={ports['metrics']}" in master["command"]
    meta = service["metadata"]
    assert f"{meta['name']}.{meta['namespace']}.svc:{ports['rpc']}" == MASTER
    labels = manifests["Deployment", "mooncake-master"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    figures = manifests["NetworkPolicy", "mooncake-metrics"]["spec"]
    assert figures["ingress"][0]["ports"] == [{"port": ports["metrics"]}]


def test_the_engines_configuration_is_right_and_names_the_master(
    manifests: dict[tuple[str, str], Any],
) -> None:
    if why := servers.why_no_mooncake():
        pytest.skip(why)
    (text,) = manifests["ConfigMap", "umbp"]["data"].values()
    checks, options = check_transfer_config(json.loads(text))
    assert {check.state for check in checks} == {"ok"}, checks
    assert options is not None
    assert options.store_options["master"] == MASTER
    (name,) = manifests["ConfigMap", "umbp"]["data"]
    for container in containers(manifests["Deployment", "vllm"]):
        said = " ".join([*container["command"], *container.get("args", ())])
        assert f"{container['volumeMounts'][0]['mountPath']}/{name}" in said


def unit(path: Path) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(path.read_text())
    return parsed


def commands(folder: Path, manifests: dict[tuple[str, str], Any]) -> list[Sequence[str]]:
    """What the examples start, but for vLLM."""
    started = [shlex.split(unit(path)["Service"]["ExecStart"]) for path in sorted(folder.glob("*.service"))]
    started += [each["command"] for name in WORKLOADS for each in containers(manifests[name])]
    return [[Path(program).name, *rest] for program, *rest in started if program != "sh"]


def test_the_commands_are_those_that_there_are(folder: Path, manifests: dict[tuple[str, str], Any]) -> None:
    found = commands(folder, manifests)
    assert {each[0] for each in found} == {"umbp", "mooncake_master"}
    filled = [
        [word.replace("${UMBP_MASTER}", MASTER).replace("${UMBP_SEGMENT}", "64GiB") for word in each]
        for each in found
    ]
    for program, *words in filled:
        if program != "umbp":
            continue
        command: Any = cli
        while isinstance(command, LazyGroup):
            context = command.make_context("umbp", [], resilient_parsing=True)
            command = command.get_command(context, words.pop(0))
        command.make_context("umbp", words)


def test_systemd_takes_the_units(folder: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    units = []
    for path in sorted(folder.glob("*.service")):
        units.append(tmp_path / path.name)
        units[-1].write_text(re.sub(r"/opt/umbp/bin/\w+", "/bin/true", path.read_text()))
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_masters_flags_are_those_that_it_has(folder: Path, manifests: dict[tuple[str, str], Any]) -> None:
    if why := servers.why_no_mooncake():
        pytest.skip(why)
    program = str(servers._master_program())
    help_ = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    for name, *flags in commands(folder, manifests):
        for flag in flags if name == "mooncake_master" else ():
            assert re.search(rf"^\s+-{flag.lstrip('-').partition('=')[0]}\s", help_, re.MULTILINE), flag
    for flag in ("client_ttl", "default_kv_lease_ttl", "rpc_port", "metrics_port"):
        assert f"-{flag} " in help_, "docs/distributed.md speaks of it"


def test_a_pod_has_room_for_what_its_node_offers(manifests: dict[tuple[str, str], Any]) -> None:
    (node,) = containers(manifests["DaemonSet", "umbp-store-node"])
    offered = node["command"][node["command"].index("--segment") + 1]
    limit = node["resources"]["limits"]["memory"]
    assert int(limit.removesuffix("Gi")) > int(offered.removesuffix("GiB"))


def test_the_counters_that_show_a_failure_are_those_that_there_are(project_root: Path) -> None:
    docs = project_root / "docs"
    named = set(re.findall(r"`(umbp_\w+)`", (docs / "distributed.md").read_text()))
    assert len(named) > 5
    assert named <= set(re.findall(r"`vllm:(umbp_\w+)`", (docs / "metrics.md").read_text()))
