"""A plug-in without installing one: a folder that looks installed once it is on the module path."""

from __future__ import annotations

from pathlib import Path

from umbp.options import MODES


def write_plug_in(
    folder: Path, name: str, value: str, distribution: str = "umbp-test-plugin", group: str = MODES.group
) -> Path:
    """Makes `folder` offer the mode (or what the group has) as `value` ("module:callable"); returns the
    folder.
    """
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return folder
