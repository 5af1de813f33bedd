"""`umbp check-gpu` passes what is right and finds what is wrong, on a device in host memory."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from late_device import LateCopies, LateDevice, LateStream

from umbp.transfer import Engine
from umbp.transfer.direct import DirectEngine

torch = pytest.importorskip("torch")

from umbp.cli.gpu import lab  # noqa: E402
from umbp.cli.gpu.checks import RULES, findings  # noqa: E402
from umbp.cli.gpu.command import FAILED, NO_GPU, PASSED, check_gpu, report  # noqa: E402
from umbp.cli.gpu.layouts import LAYOUTS  # noqa: E402


class LateLab:
    """A lab whose GPU is a `LateDevice`."""

    def __init__(self, make_device: Callable[[], LateDevice] = LateDevice) -> None:
        self.device = torch.device("cpu")
        self.late = make_device()

    def engines(self, kv_caches: Any) -> dict[str, Engine]:
        return {
            "direct": DirectEngine(kv_caches, self.late, LateCopies(self.late), 1, shortest_bytes=1),
            "staged": LateCopies(self.late),
        }

    def missing(self) -> dict[str, str]:
        return {}

    def launch(self, work: Callable[[], object]) -> None:
        self.late.launch(lambda: work() and None)

    def keep_busy(self) -> None:
        pass

    def settle(self) -> None:
        self.late.run_until(None)


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


def test_a_device_that_keeps_its_promises_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(LateLab(), "a device", 1 << 20, as_json=False) == PASSED
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok ") for line in lines) == 2 * len(LAYOUTS)
    assert lines[-1].startswith(f"PASS: {2 * len(LAYOUTS) * len(RULES)} checks")
    assert sum("GB/s" in line for line in lines) == 3 * 2 * 3


def test_the_lab_of_a_device_without_cuda_checks_staged_copies_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU is such a device."""
    monkeypatch.setattr(lab, "BUSY_SIZE", 8)
    assert report(lab.GpuLab(torch.device("cpu")), "a CPU", 1 << 20, as_json=False) == PASSED
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("not checked: direct copies: ")
    assert sum(line.startswith("ok    staged") for line in lines) == len(LAYOUTS)
    assert lines[-1].endswith("direct copies were not checked.")


@pytest.mark.slow
def test_the_json_tells_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(LateLab(), "a device", 1 << 20, as_json=True) == PASSED
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is True
    assert {each["rule"] for each in content["checks"]} == set(RULES)
    assert {row["engine"] for row in content["results"]} == {"memcpy", "direct", "staged"}
    references = [row for row in content["results"] if row["engine"] == "memcpy"]
    assert all(row["ratio_to_memcpy"] == 1.0 for row in references)


class Hasty(LateDevice):
    """Its streams wait for nothing."""

    def stream(self) -> LateStream:
        stream = super().stream()
        stream.wait = lambda fence: None  # type: ignore[method-assign]
        return stream


class Lossy(LateDevice):
    """Forgets the last copy of every batch."""

    def stream(self) -> LateStream:
        stream = super().stream()
        copy = stream.copy
        stream.copy = lambda a, b, c: copy(a[:-1], b[:-1], c[:-1])  # type: ignore[method-assign]
        return stream


class Spilling(LateDevice):
    """Writes a byte too many."""

    def stream(self) -> LateStream:
        stream = super().stream()
        end = stream.synchronize

        def synchronize() -> None:
            ends = [target + size for target, _, size in stream.pending]
            end()
            for address in ends[:1]:
                ctypes.memset(address, 0x5A, 1)

        stream.synchronize = synchronize  # type: ignore[method-assign]
        return stream


class Failing(LateDevice):
    def __init__(self) -> None:
        super().__init__()
        self.faults = {"copy": 1000}


class Unpinnable(LateDevice):
    """Everything is staged in truth."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = {"pin": 1000}


@pytest.mark.parametrize(
    ("make_device", "rules"),
    [
        (Hasty, {"store order", "load order"}),
        (Lossy, {"bytes"}),
        (Spilling, {"bytes"}),
        (Failing, {"bytes"}),
        (Unpinnable, set(RULES)),
    ],
)
def test_a_device_that_breaks_them_is_found_out(
    make_device: Callable[[], LateDevice], rules: set[str]
) -> None:
    bad = {each.rule for each in findings(LateLab(make_device), LAYOUTS[:2]) if each.problem}
    assert bad >= rules


@pytest.mark.slow
def test_a_failure_is_a_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(LateLab(Hasty), "a device", 1 << 20, as_json=False) == FAILED
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL  direct") and "wrong bytes" in line for line in lines)
    assert lines[-1].startswith("FAIL: ")


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--device", "meta"], ["--device", "cpu"]])
def test_without_a_gpu_nothing_passes_for_checked(arguments: list[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    result = CliRunner().invoke(check_gpu, arguments)
    assert result.exit_code == NO_GPU
    assert "nothing was checked" in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "banana"], "torch knows no device 'banana'; write cuda"),
        (["--device", "cuda:first"], "torch knows no device 'cuda:first'; write cuda"),
        (["--mib", "0"], "0 is not in the range x>=1"),
        (["--mib", "-3"], "-3 is not in the range x>=1"),
    ],
)
def test_a_wrong_option_is_no_missing_gpu(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(check_gpu, arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert "No GPU" not in result.output
