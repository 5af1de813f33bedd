"""Other processes for the commands to meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zygote import Zygote


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    with zygote.episode():
        yield zygote
    zygote.close()
