"""What reserving the KV cache in units wastes, from one token to the whole limit. Pure.

A request that holds n tokens reserves ceil(n / unit) units. A unit as long as the limit is how
servers reserved before paging: the most that a request may ever hold, at once. One of 16 tokens is
vLLM's page (PagedAttention, SOSP 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reservation:
    """What some requests reserve by one unit, in tokens."""

    unit: int
    requests: int
    used: int
    """Tokens that the requests hold in the end."""
    reserved: int

    @property
    def wasted_share(self) -> float:
        """Of what is reserved, never used."""
        return 1 - self.used / self.reserved

    def fit(self, memory_tokens: int) -> int:
        """How many such requests a memory of so many tokens holds at once, on the average."""
        return memory_tokens * self.requests // self.reserved


def reserve(lengths: Sequence[int], unit: int) -> Reservation:
    """The requests, of so many tokens each, by units of `unit` tokens.

    ValueError without a request, or for a unit or a length below 1.
    """
    if unit < 1:
        raise ValueError(f"unit: {unit}; give 1 token or more")
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths: give one request or more, each of 1 token or more")
    reserved = sum(-(-length // unit) for length in lengths) * unit
    return Reservation(unit, len(lengths), sum(lengths), reserved)
