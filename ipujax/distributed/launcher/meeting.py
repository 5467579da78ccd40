"""Meetings: instances report the next action that they take together, and go on when all report the same.

    request ::= {"what": "train_step", "digest": d}  or, when asked to report, with "facts": [[place, text]…]
    reply   ::= {"go": true}  or  {"report": true}  or  {"refused": {"what": …, "expected": …, "got": …, "hint": …}}

A collective between processes that disagree hangs, or mixes up bytes. Each instance therefore asks before each one.
The launcher receives all requests and lets all instances go, or answers all of them with the difference; to find it, it
asks instances whose digests differ to report their facts. After a refusal all later requests are refused. Facts are
texts that must be equal: shapes of arguments, a checksum of weights.

Input and output are plain data: `watch.py` sends and receives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Replies = dict[int, dict[str, Any]]
NOTHING = "nothing"  # text of a place that only other instances have


class Meetings:
    """The launcher's record of waiting instances and their requests.

    Args:
        instances: number of instances of the run.
    """

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._ended: set[int] = set()
        self._refusal: dict[str, str] | None = None

    def arrive(self, instance: int, request: Mapping[str, Any]) -> Replies:
        """Record the request of an instance, and return the replies to send by instance."""
        self._waiting[instance] = request
        if self._refusal is None and (unreported := self._unreported()):
            for index in unreported:
                del self._waiting[index]
            return {index: {"report": True} for index in unreported}
        # A difference is refused at once: the instance that is still to come may be stuck because of it.
        self._refusal = self._refusal or self._difference() or self._absence()
        if self._refusal is not None:
            return self._reply({"refused": self._refusal})
        return self._reply({"go": True}) if len(self._waiting) == self._instances else {}

    def end(self, instance: int) -> Replies:
        """Record the end of an instance, and return the replies to those that waited for it."""
        self._ended.add(instance)
        self._refusal = self._refusal or self._absence()
        return {} if self._refusal is None else self._reply({"refused": self._refusal})

    def waiting(self) -> dict[int, str]:
        """Return the action of each instance that waits."""
        return {instance: request["what"] for instance, request in self._waiting.items()}

    def _reply(self, reply: dict[str, Any]) -> Replies:
        replies = dict.fromkeys(self._waiting, reply)
        self._waiting.clear()
        return replies

    def _absence(self) -> dict[str, str] | None:
        """Return a refusal if instances wait for one that has ended."""
        if not self._ended or not self._waiting:
            return None
        return {
            "what": f"{name_instances(self._ended)} ended while others wait to go on together",
            "expected": "every instance makes the same calls",
            "got": f"{_group_by_text(self.waiting())} still to come",
            "hint": "give all instances the same number of steps",
        }

    def _unreported(self) -> list[int]:
        """Return waiting instances without facts, if all have one action and their digests differ."""
        actions, digests = ({request[key] for request in self._waiting.values()} for key in ("what", "digest"))
        if len(actions) > 1 or len(digests) == 1:
            return []
        return [instance for instance, request in self._waiting.items() if "facts" not in request]

    def _difference(self) -> dict[str, str] | None:
        """Return a refusal if waiting instances have different actions or facts."""
        if len({request["what"] for request in self._waiting.values()}) > 1:
            return {
                "what": "instances are not at the same point of the program",
                "expected": "every instance makes the same calls in the same order",
                "got": _group_by_text(self.waiting()),
                "hint": "look for a call that only some instances make",
            }
        if len({request["digest"] for request in self._waiting.values()}) <= 1:
            return None
        reports = {instance: dict(request["facts"]) for instance, request in self._waiting.items()}
        # The instance with most places comes first: a part that another lacks is reported before its container.
        places = dict.fromkeys(place for texts in sorted(reports.values(), key=len, reverse=True) for place in texts)
        place = next(place for place in places if len({texts.get(place, NOTHING) for texts in reports.values()}) > 1)
        action = next(iter(self._waiting.values()))["what"]
        return {
            "what": f"instances disagree on {place} of {action}",
            "expected": "the same on every instance",
            "got": _group_by_text({instance: texts.get(place, NOTHING) for instance, texts in reports.items()}),
        }


def name_instances(instances: Iterable[int]) -> str:
    """Return instances in words: "instance 2", "instances 0, 1"."""
    numbers = sorted(instances)
    return f"instance{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _group_by_text(texts: Mapping[int, str]) -> str:
    """Return each text with its instances: "f32[4] on instances 0, 2; f32[6] on instance 1"."""
    groups: dict[str, list[int]] = {}
    for instance in sorted(texts):
        groups.setdefault(texts[instance], []).append(instance)
    return "; ".join(f"{text} on {name_instances(instances)}" for text, instances in groups.items())
