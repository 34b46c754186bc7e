"""Which replica a match's requests go to: rendezvous hashing with bounded loads. Pure.

Both sides of a match extend one transcript, so it must stay where that is cached. Every match has
an order of preference among the replicas, by a hash of both names (Thaler and Ravishankar, "Using
name-based mappings to increase hit rates", 1998); it goes to the first in it that holds fewer than
`SLACK` times its even share of the live matches (as in Mirrokni, Thorup and Zadimoghaddam,
"Consistent hashing with bounded loads", 2018), and stays there. A replica that leaves gives up its
own matches alone; one that comes takes those that prefer it to all others.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable

SLACK = 1.1
"""A replica holds at most so many times its even share of the live matches, rounded up."""

FORGET_S = 60.0
"""A match that asked for nothing in so long counts no more, and has its place chosen anew."""


class _Place:
    """Where a match is."""

    __slots__ = ("in_flight", "replica", "seen")

    def __init__(self, replica: str, seen: float) -> None:
        self.replica = replica
        self.seen = seen
        self.in_flight = 0


class Affinity:
    """Places matches on replicas. Times are seconds of any one monotonic clock."""

    def __init__(self, replicas: Iterable[str] = ()) -> None:
        self._replicas: frozenset[str] = frozenset(replicas)
        self._places: dict[str, _Place] = {}
        """By match, the one that asked last at the end."""
        self._load: Counter[str] = Counter()

    @property
    def replicas(self) -> frozenset[str]:
        """Those that matches may be placed on."""
        return self._replicas

    @property
    def load(self) -> dict[str, int]:
        """Live matches on each replica."""
        return {replica: self._load[replica] for replica in sorted(self._replicas)}

    def update(self, replicas: Iterable[str]) -> None:
        """Place on these from now on. Matches on others, and those that prefer a new one to all
        that there are, are placed anew when they next ask."""
        now = frozenset(replicas)
        new = now - self._replicas
        self._replicas = now
        for match_id, place in list(self._places.items()):
            if place.replica not in now or (new and self._first(match_id) in new):
                self._forget(match_id)

    def begin(self, match_id: str, now: float) -> str | None:
        """The replica for a request of the match, which is in flight until `end`. None: there are
        no replicas. Requests of no match (an empty id) go where the fewest matches are."""
        if not self._replicas:
            return None
        if not match_id:
            return min(sorted(self._replicas), key=lambda replica: self._load[replica])
        self._forget_old(now)
        place = self._places.pop(match_id, None)
        if place is None:
            place = _Place(self._choose(match_id), now)
            self._load[place.replica] += 1
        self._places[match_id] = place
        place.seen = now
        place.in_flight += 1
        return place.replica

    def end(self, match_id: str, now: float) -> None:
        """A request that `begin` placed is no longer in flight."""
        place = self._places.get(match_id)
        if place is not None and place.in_flight:
            place.in_flight -= 1
            place.seen = now

    def _choose(self, match_id: str) -> str:
        most = math.ceil(SLACK * (len(self._places) + 1) / len(self._replicas))
        with_room = [one for one in self._replicas if self._load[one] < most]
        return max(with_room, key=lambda replica: _weight(match_id, replica))

    def _first(self, match_id: str) -> str:
        return max(self._replicas, key=lambda replica: _weight(match_id, replica))

    def _forget_old(self, now: float) -> None:
        """Matches at the front have asked longest ago; one with a request in flight is live."""
        for match_id, place in list(self._places.items()):
            if now - place.seen < FORGET_S:
                return
            if not place.in_flight:
                self._forget(match_id)

    def _forget(self, match_id: str) -> None:
        self._load[self._places.pop(match_id).replica] -= 1


def _weight(match_id: str, replica: str) -> tuple[bytes, str]:
    pair = f"{match_id}\0{replica}".encode()
    return hashlib.blake2b(pair, digest_size=8).digest(), replica
