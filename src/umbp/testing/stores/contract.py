"""The cluster store contract as tests. An adapter's test is a class and a fixture:

    class TestMyStore(StoreContract):
        @pytest.fixture(scope="class")
        @classmethod
        def make_store(cls):
            return lambda: MyStore(...)

`make_store` makes connections to one store with room for some 200 MiB, not open yet; the suite opens and
closes them, and leaves the store without its own objects. A class whose store can be killed and started anew
has `StoreDeathContract` beside it, with a fixture of its own.
"""

from __future__ import annotations

from umbp.testing.stores.rules.bounds import BoundsRules
from umbp.testing.stores.rules.calls import CallsRules
from umbp.testing.stores.rules.content import ContentRules
from umbp.testing.stores.rules.death import StoreDeathContract
from umbp.testing.stores.rules.life import LifeRules
from umbp.testing.stores.rules.model import ModelRules

__all__ = ["StoreContract", "StoreDeathContract"]


class StoreContract(CallsRules, ContentRules, BoundsRules, LifeRules, ModelRules):
    """Every sentence of `umbp.store.base` about a store that is well."""
