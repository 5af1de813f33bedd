"""Engines and their cluster store on a network that loses packets: some, and then all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import far_lossy
import pytest

from umbp.testing.stores.servers import why_no_mooncake

pytestmark = [pytest.mark.slow, pytest.mark.alone]

ENVIRONMENT = os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
"""Users' paths lack where Debian keeps two of the tools."""

TRIAL = "ip link set lo up && tc qdisc replace dev lo root blackhole"


def why_no_loss() -> str | None:
    """Why no network of its own can be made to lose packets here."""
    missing = [
        name for name in ("unshare", "ip", "tc") if shutil.which(name, path=ENVIRONMENT["PATH"]) is None
    ]
    if missing:
        return f"there is no {missing[0]} here (Debian: apt-get install iproute2 util-linux)"
    tried = subprocess.run(
        ["unshare", "-n", "sh", "-c", TRIAL], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    return f"this machine makes no network that loses packets: {tried.stderr}" if tried.returncode else None


def test_on_a_network_that_loses_packets_answers_are_right_steps_short_and_hits_return(
    tmp_path: Path,
) -> None:
    if why := why_no_mooncake() or why_no_loss():
        pytest.skip(why)
    done = subprocess.run(
        ["unshare", "-n", sys.executable, far_lossy.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=ENVIRONMENT,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-6000:]
