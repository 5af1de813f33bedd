"""The suite fails for every store that breaks a sentence of the contract."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from broken_stores import Broken

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The failed tests of each broken store, from one run of the suite in a process of its own."""
    report = tmp_path_factory.mktemp("report") / "report.xml"
    options = ("-q", "--tb=no", "-p", "no:cacheprovider", f"--junitxml={report}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE / "broken_stores.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    failed: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.setdefault(case.attrib["classname"].rpartition(".")[2], []).append(case.attrib["name"])
    return failed


@pytest.mark.parametrize("broken", Broken.__subclasses__(), ids=lambda broken: broken.__name__)
def test_a_broken_sentence_is_noticed(broken: type[Broken], failures: dict[str, list[str]]) -> None:
    assert failures.get(broken.__name__), f"nothing fails for a store that {broken.__name__[4:]}"
