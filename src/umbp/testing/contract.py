"""The runtime contract as tests. A backend's test is a class and a fixture:

    class TestMyRuntime(RuntimeContract):
        @pytest.fixture
        def runtime(self):
            yield MyRuntime(...)

The flags of the class say what a backend can't do by nature; a test that doesn't apply skips with a sentence.
"""

from __future__ import annotations

from umbp.testing.rules.calls import CallsContract
from umbp.testing.rules.content import ContentContract
from umbp.testing.rules.extras import ExtrasContract
from umbp.testing.rules.model import ModelContract

__all__ = ["RuntimeContract"]


class RuntimeContract(CallsContract, ContentContract, ExtrasContract, ModelContract):
    """Every sentence of `umbp.runtime.base`. The fixture `runtime` gives a fresh runtime for each test."""
