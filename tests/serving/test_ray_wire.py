"""What crosses between the arena and replicas comes out as it went in, on clocks that differ."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import (
    ChatPrompt,
    EngineDead,
    EngineError,
    EngineSnapshot,
    EngineStalled,
    EngineUnavailable,
    Finish,
    MalformedReply,
    Overloaded,
    Prompt,
    Reply,
    Request,
    RequestRejected,
    Sampling,
    Timings,
    TokenPrompt,
    Usage,
)
from serving.ray_wire import (
    Fields,
    error_of,
    prompt_fields,
    prompt_of,
    reply_fields,
    reply_of,
    request_fields,
    request_of,
    snapshot_fields,
    snapshot_of,
)

TEXTS = st.text(max_size=20)
COUNTS = st.integers(0, 1 << 40)
SECONDS = st.floats(0, 1e6)
CLOCK = st.floats(0, 1e9)
OPTIONAL_SECONDS = st.none() | SECONDS
OPTIONAL_COUNTS = st.none() | COUNTS
SHARES = st.none() | st.floats(0, 1)

PROMPTS: st.SearchStrategy[Prompt] = st.builds(
    TokenPrompt, st.lists(COUNTS, max_size=20)
) | st.builds(ChatPrompt, st.lists(st.tuples(TEXTS, TEXTS), max_size=4).map(tuple))

REQUESTS = st.builds(
    Request,
    id=TEXTS,
    match_id=TEXTS,
    prompt=PROMPTS,
    choices=st.none() | st.lists(TEXTS, max_size=4).map(tuple),
    max_tokens=COUNTS,
    sampling=st.builds(Sampling, SECONDS, st.floats(0, 1), st.none() | COUNTS, COUNTS),
    deadline_s=SECONDS,
    stream=st.booleans(),
    use_prefix_cache=st.booleans(),
    stop=st.lists(TEXTS, max_size=3).map(tuple),
)

USAGES = st.builds(Usage, OPTIONAL_COUNTS, COUNTS, OPTIONAL_COUNTS)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    """As a replica makes them, on its own clock."""
    admitted, first_s, rest_s = draw(CLOCK), draw(SECONDS), draw(SECONDS)
    first = draw(st.none() | st.just(admitted + first_s))
    done = admitted + first_s + rest_s
    durations = [draw(OPTIONAL_SECONDS) for _ in range(3)]
    return Reply(
        draw(TEXTS),
        draw(st.sampled_from(Finish)),
        draw(USAGES),
        Timings(admitted, admitted, first, done, *durations),
        draw(OPTIONAL_SECONDS),
        None,
        draw(TEXTS),
    )


SNAPSHOTS = st.builds(
    EngineSnapshot,
    at=CLOCK,
    source=st.sampled_from(["per_step", "sampled"]),
    running=OPTIONAL_COUNTS,
    waiting=OPTIONAL_COUNTS,
    step_requests=OPTIONAL_COUNTS,
    step_tokens=OPTIONAL_COUNTS,
    kv_usage=SHARES,
    prefix_queries=OPTIONAL_COUNTS,
    prefix_hits=OPTIONAL_COUNTS,
    preemptions=OPTIONAL_COUNTS,
    rejected=OPTIONAL_COUNTS,
    replica=st.just("r1"),
)


def carried(fields: Fields) -> Any:
    """As it arrives on the other side."""
    return json.loads(json.dumps(fields))


@given(PROMPTS)
def test_prompts_arrive_as_they_left(prompt: Prompt) -> None:
    assert prompt_of(carried(prompt_fields(prompt))) == prompt


def test_a_prompt_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown prompt 'image'"):
        prompt_of(["image", []])


@given(REQUESTS)
def test_requests_arrive_as_they_left(request: Request) -> None:
    assert request_of(carried(request_fields(request))) == request


@given(replies(), CLOCK, SECONDS)
def test_replies_arrive_on_our_clock_with_the_engines_own_durations(
    reply: Reply, admitted: float, took_s: float
) -> None:
    arrived = reply_of(carried(reply_fields(reply)), "r1", admitted, admitted + took_s)
    assert (arrived.text, arrived.finish, arrived.usage) == (reply.text, reply.finish, reply.usage)
    assert arrived.step_requests_mean == reply.step_requests_mean
    assert (arrived.reasoning, arrived.replica) == (reply.reasoning, "r1")
    ours, theirs = arrived.timings, reply.timings
    assert (ours.submitted, ours.admitted, ours.done) == (admitted, admitted, admitted + took_s)
    assert (ours.queue_s, ours.prefill_s, ours.decode_s) == (
        theirs.queue_s,
        theirs.prefill_s,
        theirs.decode_s,
    )
    assert (ours.first_token is None) == (theirs.first_token is None)
    if ours.first_token is not None:
        assert ours.admitted <= ours.first_token <= ours.done


def test_a_first_token_is_as_long_before_the_end_as_it_was_there() -> None:
    there = Timings(5.0, 5.0, 6.0, 8.0, None, None, None)
    fields = carried(reply_fields(Reply("e2e4", Finish.STOP, Usage(1, 2, 0), there)))
    assert reply_of(fields, "r1", 100.0, 103.5).timings.first_token == 101.5
    assert reply_of(fields, "r1", 100.0, 101.0).timings.first_token == 100.0


@given(SNAPSHOTS, SECONDS)
def test_snapshots_arrive_as_they_left(snapshot: EngineSnapshot, age_s: float) -> None:
    """Where both sides have one clock, so do the times, but for rounding."""
    now = snapshot.at + age_s
    arrived = snapshot_of(carried(snapshot_fields(snapshot, now)), "r1", now)
    assert arrived.at == pytest.approx(snapshot.at, abs=1e-6)
    told, meant = ([*one.__slots__] for one in (arrived, snapshot))
    assert told == meant
    for name in told:
        assert name == "at" or getattr(arrived, name) == getattr(snapshot, name)


@given(SNAPSHOTS, CLOCK, CLOCK)
def test_no_snapshot_arrives_from_the_future(
    snapshot: EngineSnapshot, there: float, here: float
) -> None:
    assert snapshot_of(carried(snapshot_fields(snapshot, there)), "r1", here).at <= here


@pytest.mark.parametrize(
    "error",
    [
        Overloaded,
        RequestRejected,
        EngineUnavailable,
        MalformedReply,
        EngineStalled,
        EngineDead,
    ],
)
def test_errors_arrive_as_what_they_are(error: type[EngineError]) -> None:
    arrived = error_of(error.kind, "on purpose")
    assert type(arrived) is error
    assert str(arrived) == "on purpose"


def test_the_end_of_one_replica_is_not_the_end_of_all() -> None:
    arrived = error_of(EngineDead.kind, "gone")
    assert isinstance(arrived, EngineDead)
    assert not arrived.final


def test_an_error_of_a_kind_that_nobody_knows_is_one_of_the_way() -> None:
    assert type(error_of("odd", "what?")) is EngineUnavailable
