"""Which replica a match's requests go to: rendezvous hashing with bounded loads. Pure.

Both sides of a match extend one transcript, so it must stay where that is cached. Every match has
an order of preference among the replicas, by a hash of both names (Thaler and Ravishankar, "Using
name-based mappings to increase hit rates", 1998); it goes to the first in it that holds less than
an even share of the live matches, rounded up (as in Mirrokni, Thorup and Zadimoghaddam, "Consistent
hashing with bounded loads", 2018), and stays there. A replica that leaves gives up its own matches
alone; one that comes takes those that prefer it to all others.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable

LIVE_S = 10.0
"""A match that asked for nothing in so long takes no part in the shares; its place is kept."""

MOST_PLACES = 16_384
"""Matches that are remembered: of more, those that asked longest ago have their places chosen anew.
"""


class _Place:
    """Where a match is."""

    __slots__ = ("in_flight", "replica", "seen")

    def __init__(self, replica: str, seen: float) -> None:
        self.replica = replica
        self.seen = seen
        self.in_flight = 0

    def is_live(self, now: float) -> bool:
        return self.in_flight > 0 or now - self.seen < LIVE_S


class Affinity:
    """Places matches on replicas. Times are seconds of any one monotonic clock."""

    def __init__(self, replicas: Iterable[str] = ()) -> None:
        self._replicas: frozenset[str] = frozenset(replicas)
        self._places: dict[str, _Place] = {}
        """By match, the one that asked last at the end."""

    @property
    def replicas(self) -> frozenset[str]:
        """Those that matches may be placed on."""
        return self._replicas

    def load(self, now: float) -> dict[str, int]:
        """Live matches on each replica."""
        live = Counter(place.replica for place in self._places.values() if place.is_live(now))
        return {replica: live[replica] for replica in sorted(self._replicas)}

    def update(self, replicas: Iterable[str]) -> None:
        """Place on these from now on. Matches on others, and those that prefer a new one to all
        that there are, are placed anew when they next ask."""
        now = frozenset(replicas)
        new = now - self._replicas
        self._replicas = now
        for match_id, place in list(self._places.items()):
            if place.replica not in now or self._is_drawn(match_id, place.replica, new):
                del self._places[match_id]

    def begin(self, match_id: str, now: float) -> str | None:
        """The replica for a request of the match, which is in flight until `end`. None: there are
        no replicas. Requests of no match (an empty id) go where the fewest matches are."""
        if not self._replicas:
            return None
        if not match_id:
            load = self.load(now)
            return min(load, key=lambda replica: load[replica])
        place = self._places.pop(match_id, None) or _Place(self._choose(match_id, now), now)
        self._places[match_id] = place
        place.seen = now
        place.in_flight += 1
        if len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]
        return place.replica

    def end(self, match_id: str, now: float) -> None:
        """A request that `begin` placed is no longer in flight."""
        place = self._places.get(match_id)
        if place is not None and place.in_flight:
            place.in_flight -= 1
            place.seen = now

    def _choose(self, match_id: str, now: float) -> str:
        load = self.load(now)
        most = math.ceil((sum(load.values()) + 1) / len(load))
        return self._prefers(match_id, [one for one, held in load.items() if held < most])

    def _is_drawn(self, match_id: str, replica: str, new: frozenset[str]) -> bool:
        """Whether a match that is at `replica` prefers one of the new ones to all others."""
        here = _weight(match_id, replica)
        # few are compared with all, for there may be thousands of matches and hundreds of replicas
        is_better = any(_weight(match_id, one) > here for one in new)
        return is_better and self._prefers(match_id, self._replicas) in new

    @staticmethod
    def _prefers(match_id: str, replicas: Iterable[str]) -> str:
        return max(replicas, key=lambda replica: _weight(match_id, replica))


def _weight(match_id: str, replica: str) -> tuple[bytes, str]:
    pair = f"{match_id}\0{replica}".encode()
    return hashlib.blake2b(pair, digest_size=8).digest(), replica
