"""Runs the tests in passes, and says at the end what became of all of them together.

First those marked vllm033 on vLLM 0.33, where `make setup-vllm033` has run; then every test, in several
processes side by side, a module to a process; then, one after the other, those marked `alone`, which measure
time or the whole machine. A pass that fails doesn't keep the next from running. Arguments go to pytest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OTHER_VLLM = ROOT / ".venv-vllm033" / "bin" / "python"
NO_TEST_WAS_SELECTED = 5

# In the order of the folders: the largest modules are in the middle, and at the end no process waits long.
SIDE_BY_SIDE = ("--dist=loadfile", "--no-loadscope-reorder")


@dataclass(frozen=True, slots=True)
class Pass:
    title: str
    python: str
    selected: str
    is_side_by_side: bool = True

    def command(self, jobs: int, report: Path, arguments: list[str]) -> list[str]:
        beside = (f"-n{jobs}", *SIDE_BY_SIDE) if self.is_side_by_side and jobs > 1 else ()
        quiet = ("-o", "junit_logging=no", f"--junitxml={report}")
        return [self.python, "-m", "pytest", "-m", self.selected, *beside, *quiet, *arguments]


def passes(is_quick: bool) -> list[Pass]:
    if is_quick:
        return [Pass("the tests that start no engine", sys.executable, "not slow and not alone")]
    chosen = [
        Pass("every test, side by side", sys.executable, "not alone"),
        Pass("the tests that are run alone", sys.executable, "alone", is_side_by_side=False),
    ]
    if OTHER_VLLM.exists():
        other = "vLLM 0.33: the tests marked vllm033"
        chosen.insert(0, Pass(other, str(OTHER_VLLM), "vllm033 and not alone"))
    else:
        print("-- vLLM 0.33 isn't set up here (make setup-vllm033): its tests are skipped", flush=True)
    return chosen


def count(report: Path) -> Counter[str]:
    """What pytest's report says of how many."""
    counts: Counter[str] = Counter()
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            found = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
            bad = found["failures"] + found["errors"]
            counts.update(failed=bad, skipped=found["skipped"])
            counts.update(passed=found["tests"] - bad - found["skipped"])
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="leave out what takes more than a few seconds")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes run tests side by side")
    chosen, arguments = parser.parse_known_args()
    begun_s = time.monotonic()
    total: Counter[str] = Counter()
    codes = []
    with tempfile.TemporaryDirectory(prefix="umbp-tests-") as folder:
        for number, each in enumerate(passes(chosen.quick)):
            print(f"-- {each.title}", flush=True)
            report = Path(folder) / f"{number}.xml"
            codes.append(subprocess.run(each.command(chosen.jobs, report, arguments), check=False).returncode)
            total += count(report)
    if set(codes) == {NO_TEST_WAS_SELECTED}:
        return NO_TEST_WAS_SELECTED
    told = ", ".join(f"{total[name]} {name}" for name in ("failed", "passed", "skipped") if total[name])
    print(f"-- in all {told or 'nothing'} in {time.monotonic() - begun_s:.0f} s")
    return int(any(code not in (0, NO_TEST_WAS_SELECTED) for code in codes))


if __name__ == "__main__":
    sys.exit(main())
