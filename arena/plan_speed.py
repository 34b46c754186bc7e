"""How many requests a second a plan's engine answers: measured, else estimated by a roofline."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

from arena.config import ConfigError
from arena.plan_workload import Workload
from serving.capacity import BANDWIDTH_SHARE, COMPUTE_SHARE, Roofline
from serving.checked import json_object


class Speed(Protocol):
    """What is known of how fast an engine answers."""

    @property
    def source(self) -> Literal["measured", "estimate"]: ...

    def rate(self, batch: int) -> float:
        """Requests a second while so many are always in the engine."""
        ...

    def assumptions(self, batch: int) -> list[str]:
        """What that rests on, in words."""
        ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """By a roofline."""

    roof: Roofline
    workload: Workload
    source: Literal["estimate"] = "estimate"

    def rate(self, batch: int) -> float:
        work = self.workload
        return self.roof.requests_per_s(
            work.context_tokens, work.uncached_tokens, work.output_tokens, batch
        )

    def assumptions(self, batch: int) -> list[str]:
        device = self.roof.device
        return [
            f"{COMPUTE_SHARE:.0%} of {device.name}'s {device.flops / 1e12:g} TFLOPS",
            f"{BANDWIDTH_SHARE:.0%} of its {device.bytes_per_s / 1e9:g} GB/s",
            f"batches of {batch:,}, always full",
        ]


@dataclass(frozen=True, slots=True)
class Measured:
    """By `arena bench shape`."""

    rates: tuple[tuple[int, float], ...]
    """Streams at once, and the requests a second that they were answered."""
    engine: str
    source: Literal["measured"] = "measured"

    def rate(self, batch: int) -> float:
        """At least: of fewer streams than were measured, their share."""
        return self._best(batch)[0]

    def assumptions(self, batch: int) -> list[str]:
        return [f"{self.engine}, {self._best(batch)[1]:,} at once"]

    def _best(self, batch: int) -> tuple[float, int]:
        return max((rate * min(1, batch / streams), streams) for streams, rate in self.rates)


def measured(path: Path, model: str) -> Measured:
    """Cells of the default shape, in what `arena bench shape --json` wrote: medians of their
    repeats. ConfigError where there are none, or another model was measured."""
    try:
        told = json_object(path.read_bytes())
        engine = told["engine"]
        other, name = engine["model"], f"{engine['name']} ({engine['kind']})"
        rates = tuple(
            (cell["streams"], median(cell["moves_per_s"]))
            for cell in told["cells"]
            if (cell["shape"], cell["submission"]) == ("default", "continuous") and _is_rate(cell)
        )
    except OSError as error:
        raise ConfigError(f"--bench: {str(path)[:200]} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        rates, other, name = (), None, ""
    if not rates:
        raise ConfigError(
            f'--bench: {path} has no cell of the shape "default"; give what `arena bench shape '
            "--json` printed"
        )
    if other is not None and other != model:
        raise ConfigError(
            f"--bench: {path} measured the model {str(other)[:200]!r}, and this plan is of "
            f"{model[:200]!r}; name the same by --model"
        )
    return Measured(rates, name)


def _is_rate(cell: dict[str, object]) -> bool:
    """Whether a cell has moves a second of so many streams, in numbers."""
    rates, streams = cell["moves_per_s"], cell["streams"]
    return (
        isinstance(rates, list)
        and bool(rates)
        and all(type(rate) in (int, float) and 0 < rate < math.inf for rate in rates)
        and type(streams) is int
        and streams >= 1
    )
