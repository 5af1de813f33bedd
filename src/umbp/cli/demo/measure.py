"""The demo's experiment: what one document costs cold, from the engine's own cache, and from UMBP's pool.

Each round has an edition of the document of its own, so that its first answer is truly cold. In a round the
document is asked, asked again (the engine still holds it), pushed out by other prompts, and asked once more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from umbp.cli.demo import document
from umbp.cli.demo.engine import Answer

ANSWER_TOKENS = 24
WARM_UP_EDITION = 0

LOCAL_HITS = "vllm:prefix_cache_hits"
LOADED_TOKENS = "vllm:umbp_loaded_tokens"
LOADED_BYTES = "vllm:umbp_loaded_bytes"
FAILED_TOKENS = "vllm:umbp_failed_load_tokens"

Say = Callable[[str], None]


class AsksEngine(Protocol):
    """What the experiment needs of an engine."""

    def ask(self, system: str, text: str, *, max_tokens: int) -> Answer: ...

    def counters(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Round:
    """One edition of the document. The counters are those of the restored answer alone."""

    cold: Answer
    engine_hit: Answer
    restored: Answer
    restored_tokens: int
    restored_bytes: int
    failed_tokens: int
    still_held_tokens: int

    @property
    def is_identical(self) -> bool:
        """The restored answer is the engine's own, to the bit, from equally many cached tokens."""
        return (
            self.restored.is_same_as(self.engine_hit)
            and self.restored.cached_tokens == self.engine_hit.cached_tokens
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """All rounds, and the control: the last edition with one early word changed, asked while it is in both
    caches.
    """

    rounds: Sequence[Round]
    control: Answer

    @property
    def cold_s(self) -> float:
        return statistics.median(each.cold.ttft_s for each in self.rounds)

    @property
    def engine_hit_s(self) -> float:
        return statistics.median(each.engine_hit.ttft_s for each in self.rounds)

    @property
    def restored_s(self) -> float:
        return statistics.median(each.restored.ttft_s for each in self.rounds)

    @property
    def tokens_restored(self) -> int:
        """The least of all rounds."""
        return min(each.restored_tokens for each in self.rounds)

    @property
    def bytes_restored(self) -> int:
        return min(each.restored_bytes for each in self.rounds)

    @property
    def is_identical(self) -> bool:
        return all(each.is_identical for each in self.rounds)

    @property
    def is_control_different(self) -> bool:
        return not self.control.is_same_as(self.rounds[-1].restored)

    def problems(self) -> list[str]:
        """What is not as it should be, a sentence each; empty when all is well."""
        found = [
            sentence for number, each in enumerate(self.rounds, 1) for sentence in _problems(number, each)
        ]
        if self.control.cached_tokens:
            found.append(
                f"Control: {self.control.cached_tokens} tokens came from a cache in spite of its word."
            )
        if not self.is_control_different:
            found.append(
                "Control: one changed word early in the document did not change the answer's probabilities."
            )
        if self.restored_s >= self.cold_s:
            found.append(f"Restoring took {self.restored_s:.3f} s, computing {self.cold_s:.3f} s.")
        return found


def _problems(number: int, each: Round) -> list[str]:
    found = []
    if each.cold.cached_tokens:
        found.append(f"the cold answer was not cold: {each.cold.cached_tokens} tokens came from a cache.")
    if not each.engine_hit.cached_tokens:
        found.append("the engine's own prefix cache was not hit.")
    if each.still_held_tokens:
        found.append(
            f"the engine still held {each.still_held_tokens} tokens of the document, which should be lost."
        )
    if not each.restored_tokens:
        found.append("nothing was restored from the pool.")
    elif each.restored_tokens != each.engine_hit.cached_tokens:
        found.append(
            f"{each.restored_tokens} of {each.engine_hit.cached_tokens} tokens were restored from the pool."
        )
    if each.restored_tokens and not each.restored_bytes:
        found.append("no bytes were moved for the restored tokens.")
    if each.failed_tokens:
        found.append(f"loads of {each.failed_tokens} tokens failed.")
    if not each.restored.is_same_as(each.engine_hit):
        found.append("the restored answer differs from the answer out of the engine's own cache.")
    return [f"Round {number}: {sentence}" for sentence in found]


def measure(engine: AsksEngine, rounds: int, say: Say) -> Measurement:
    """Runs the experiment on a started engine; `say` is told each step as it begins."""
    say("Warming up, so that the first measured answer pays for itself only")
    for prompt in (document.fillers(WARM_UP_EDITION)[0], document.long_document(WARM_UP_EDITION)):
        engine.ask(document.SYSTEM, prompt.text, max_tokens=ANSWER_TOKENS)
    done = [_measure_round(engine, edition, rounds, say) for edition in range(1, rounds + 1)]
    say("Control: the same document with one early word changed")
    control = engine.ask(document.SYSTEM, document.changed_document(rounds).text, max_tokens=ANSWER_TOKENS)
    return Measurement(rounds=done, control=control)


def _measure_round(engine: AsksEngine, edition: int, rounds: int, say: Say) -> Round:
    def ask(text: str, tokens: int = ANSWER_TOKENS) -> Answer:
        return engine.ask(document.SYSTEM, text, max_tokens=tokens)

    which = f"Round {edition} of {rounds}"
    prompt = document.long_document(edition)
    say(f"{which}: a new document, computed cold")
    cold = ask(prompt.text)
    say(f"{which}: the same again, from the engine's own cache ({cold.ttft_s:.2f} s cold)")
    # The first repetition may still share the cores with the storing of the cold one; the second does not.
    ask(prompt.text)
    engine_hit = ask(prompt.text)
    say(f"{which}: other prompts push it out ({engine_hit.ttft_s:.3f} s from the engine's cache)")
    for filler in document.fillers(edition):
        ask(filler.text, 1)
    before = engine.counters()
    restored = ask(prompt.text)
    after = engine.counters()
    say(f"{which}: asked once more, {restored.ttft_s:.3f} s from UMBP's pool")

    def counted(name: str) -> int:
        return int(after.get(name, 0.0) - before.get(name, 0.0))

    return Round(
        cold=cold,
        engine_hit=engine_hit,
        restored=restored,
        restored_tokens=counted(LOADED_TOKENS),
        restored_bytes=counted(LOADED_BYTES),
        failed_tokens=counted(FAILED_TOKENS),
        still_held_tokens=counted(LOCAL_HITS),
    )
