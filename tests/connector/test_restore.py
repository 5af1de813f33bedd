"""What is restored is exact, whatever the length of the prompt and the state of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import BLOCK


def tokens(count: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 7919 + index * 31) % 990 for index in range(count)]


def test_smoke(make_engine: Any) -> None:
    engine = make_engine()
    prompt = tokens(5 * BLOCK + 3)
    first = engine.run(prompt, 4)
    engine.forget_prefixes()
    again = engine.run(prompt, 4)
    assert list(again.output_token_ids) == list(first.output_token_ids)
    assert engine.restored_tokens() == 5 * BLOCK
    engine.check_drained()
