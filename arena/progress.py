"""What matches tell the run that plays them."""

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Signals from matches; what there is to show is in the store's rows."""

    has_begun: bool = False
    """A match has begun: engines and agents are ready."""
    engine_failure: str | None = None
    """Why an engine will not answer again in this run, once one will not."""
