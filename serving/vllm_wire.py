"""What the arena and the vLLM host say to each other besides what every host does (`host_wire`).

arena → host                                   host → arena
ask    Ask fields                              first  number            (streamed requests)
abort  number         (nothing comes back)     reply  Answer fields
expire number         (reply: text so far)     error  number, kind, message
reset  (the prefix cache)                      reset  done?
metrics  number                                metrics  number, text of vLLM's own metrics
                                               steps  Step fields, again and again
"""

from collections.abc import Sequence
from typing import NamedTuple


class Ask(NamedTuple):
    """One request; `number` is unique on this connection."""

    number: int
    ids: Sequence[int]
    choices: Sequence[str] | None
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    min_tokens: int
    use_prefix_cache: bool
    stream: bool
    stop: Sequence[str] = ()


class Answer(NamedTuple):
    """A whole reply, or after `expire` what there was of it (`finish` "abort")."""

    number: int
    text: str
    finish: str
    prompt: int
    completion: int
    cached: int | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    step_requests_mean: float | None


class Step(NamedTuple):
    """One engine step. Counts of tokens found and looked up are this step's alone."""

    age_s: float
    requests: int | None
    tokens: int | None
    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
