"""What whoever makes a life may choose: its pool's nature, its engine's shape, its users' prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from engine_shapes import LAYOUTS, SHAPES, smallest_pool

from umbp.runtime.wrap.faulty import FaultPlan
from umbp.testing.engine import BLOCK, Shape

FAULTS = FaultPlan(
    load_keys=0.1, load_jobs=0.05, store_keys=0.1, store_jobs=0.05, lookups=0.05, publishes=0.05
)


@dataclass(frozen=True, slots=True)
class Nature:
    """What a life is like beside its engine's shape."""

    pool: str
    objects: int
    load_s: float = 0.0
    store_s: float = 0.0
    is_faulty: bool = False
    is_mortal: bool = False
    clears: bool = False
    lacks: str = ""
    """A capability that the runtime does not state."""
    fault_seed: int = 0

    @classmethod
    def drawn(cls, random: Random) -> Nature:
        """The plainest where `random` gives the first and the least each time, as when a story shrinks."""
        is_slow = random.random() >= 0.5
        return cls(
            pool=random.choice(["reference", "reference", "embedded", "standalone"]),
            objects=random.choice([2000, 120, 40, 12]),
            load_s=random.choice([0.5, 1.0, 6.0]) if is_slow else 0.0,
            store_s=random.choice([0.5, 1.5, 6.0]) if is_slow else 0.0,
            is_faulty=random.random() >= 0.6,
            is_mortal=random.random() >= 0.6,
            clears=random.random() >= 0.6,
            lacks=random.choice(["hold", "presence", "watch", "lookup_raw"])
            if random.random() >= 0.8
            else "",
        )

    @property
    def is_shared(self) -> bool:
        """Whether engines in other processes may use the pool."""
        return self.pool == "standalone"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Families share their beginnings; ends lie on block borders as often as not."""

    family: int
    shared: int
    tail: int
    ending: int

    @classmethod
    def drawn(cls, random: Random) -> Prompt:
        return cls(
            family=random.randrange(3),
            shared=random.choice([0, BLOCK, 4 * BLOCK, 6 * BLOCK]),
            tail=random.choice([1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, random.randint(1, 90)]),
            ending=random.randrange(4),
        )

    def tokens(self, limit: int | None = None) -> list[int]:
        shared = [(self.family * 101 + i * 7) % 900 + 3 for i in range(self.shared)]
        own = [(self.family * 13 + self.ending * 57 + i * 11) % 900 + 3 for i in range(self.tail)]
        return (shared + own)[:limit]


@dataclass(frozen=True, slots=True)
class Admission:
    """A request as a user makes it."""

    prompt: Prompt
    max_tokens: int
    salt: str | None
    reads_cache: bool
    priority: int

    @classmethod
    def drawn(cls, random: Random) -> Admission:
        return cls(
            prompt=Prompt.drawn(random),
            max_tokens=random.randint(1, 30),
            salt=random.choice([None, None, None, "a", "b"]),
            reads_cache=random.random() < 0.9,
            priority=random.randrange(3),
        )


def drawn_shape(random: Random, name: str, nature: Nature) -> Shape:
    """An engine of the named kind, with what users may choose of it drawn."""
    shape = SHAPES[name]
    in_flight = shape.depth > 1 or shape.stages > 1
    options = {
        "load_async": in_flight or random.random() < 0.6,
        "save_decode_cache": random.random() < 0.5,
        "write_policy": random.choice(["through", "through", "lazy"]),
        "timeout_ms": random.choice([30_000, 2_000]),
    }
    # Only these lay a block of a state, or of other sizes, out as one run.
    layouts = ["LBNHC"] if len(shape.layers) > 1 or nature.pool == "reference" else LAYOUTS
    return replace(
        shape,
        blocks=smallest_pool(shape) + random.choice([2, 8, 30]),
        max_batched_tokens=random.choice([24, 40, 64, 200]),
        prefix_caching=shape.has_state or random.random() < 0.85,
        # By priority vLLM takes back what it has just given out, and forgets what it has cached of it.
        order="fcfs" if shape.match_tokens else random.choice(["fcfs", "fcfs", "priority"]),
        role=random.choice(["kv_both"] * 6 + ["kv_producer", "kv_consumer"]),
        policy=random.choice(["recompute"] * 6 + ["fail"]),
        layout=random.choice(layouts),
        tells_events=random.random() >= 0.7,
        extra=options,
    )
