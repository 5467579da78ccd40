"""Meetings: instances report what they are about to do together, and go on when all report the same.

    request ::= {"what": "train_step", "digest": d}  or, when asked to report, with "facts": [[place, text]…]
    reply   ::= {"go": true}  or  {"report": true}  or  {"refused": {"what": …, "expected": …, "got": …, "hint": …}}

A collective between processes that disagree hangs, or mixes up bytes. Each instance therefore asks before each one.
The launcher receives all requests and lets all instances go, or answers all of them with the difference; to find it, it
asks instances whose digests differ to report their facts. After one refusal nothing goes any more. Facts are whatever
must be equal: shapes of arguments, a checksum of weights.

Input and output are plain data: `watch.py` sends and receives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Replies = dict[int, dict[str, Any]]
NOTHING = "nothing"  # what an instance has at a place that only others have


class Meetings:
    """The launcher's side: who waits for what.

    Args:
        instances: how many have to come.
    """

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._ended: set[int] = set()
        self._refusal: dict[str, str] | None = None

    def arrive(self, instance: int, request: Mapping[str, Any]) -> Replies:
        """An instance waits to do something; what to answer to whom."""
        self._waiting[instance] = request
        if self._refusal is None and (unreported := self._unreported()):
            for index in unreported:
                del self._waiting[index]
            return {index: {"report": True} for index in unreported}
        self._refusal = self._refusal or self._difference() or self._absence()
        if self._refusal is not None:
            return self._reply({"refused": self._refusal})
        return self._reply({"go": True}) if len(self._waiting) == self._instances else {}

    def end(self, instance: int) -> Replies:
        """An instance has ended: nobody waits for it."""
        self._ended.add(instance)
        self._refusal = self._refusal or self._absence()
        return {} if self._refusal is None else self._reply({"refused": self._refusal})

    def waiting(self) -> dict[int, str]:
        """For each instance that waits, what it wants to do."""
        return {instance: request["what"] for instance, request in self._waiting.items()}

    def _reply(self, reply: dict[str, Any]) -> Replies:
        replies = dict.fromkeys(self._waiting, reply)
        self._waiting.clear()
        return replies

    def _absence(self) -> dict[str, str] | None:
        """A refusal if somebody waits for an instance that has ended."""
        if not self._ended or not self._waiting:
            return None
        wanted = _by_text(self.waiting())
        return {
            "what": f"{named(self._ended)} ended while others wait to go on together",
            "expected": "every instance makes the same calls",
            "got": f"{wanted} still to come",
            "hint": "give all instances the same number of steps",
        }

    def _unreported(self) -> list[int]:
        """Instances that wait to do the same as others with another digest, and have not reported their facts."""
        whats, digests = ({request[key] for request in self._waiting.values()} for key in ("what", "digest"))
        if len(whats) > 1 or len(digests) == 1:
            return []
        return [instance for instance, request in self._waiting.items() if "facts" not in request]

    def _difference(self) -> dict[str, str] | None:
        """A refusal if those who wait want different things."""
        if len({request["what"] for request in self._waiting.values()}) > 1:
            return {
                "what": "instances are not at the same point of the program",
                "expected": "every instance makes the same calls in the same order",
                "got": _by_text(self.waiting()),
                "hint": "look for a call that only some instances make",
            }
        if len({request["digest"] for request in self._waiting.values()}) <= 1:
            return None
        facts = {instance: dict(request["facts"]) for instance, request in self._waiting.items()}
        # The instance with most places comes first: a part that another lacks is named before the whole around it.
        places = dict.fromkeys(place for held in sorted(facts.values(), key=len, reverse=True) for place in held)
        place = next(place for place in places if len({held.get(place, NOTHING) for held in facts.values()}) > 1)
        what = next(iter(self._waiting.values()))["what"]
        return {
            "what": f"instances disagree on {place} of {what}",
            "expected": "the same on every instance",
            "got": _by_text({instance: held.get(place, NOTHING) for instance, held in facts.items()}),
        }


def named(instances: Iterable[int]) -> str:
    """Instances in words: "instance 2", "instances 0, 1"."""
    numbers = sorted(instances)
    return f"instance{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _by_text(texts: Mapping[int, str]) -> str:
    """Which instances have which text: "f32[4] on instances 0, 2; f32[6] on instance 1"."""
    having: dict[str, list[int]] = {}
    for instance in sorted(texts):
        having.setdefault(texts[instance], []).append(instance)
    return "; ".join(f"{text} on {named(instances)}" for text, instances in having.items())
