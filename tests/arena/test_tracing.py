"""Spans made of rows: their attributes, times and parents, and a collector that may be down."""

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from arena.store import AttemptRow, EventRow, MatchRow, PlyRow, RunClock, RunRow, storable
from arena.tracing import Tracer, open_tracer

CREATED = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
CONFIG = {
    "name": "by-hand",
    "slo": {"move_seconds": 1.0},
    "engines": {"main": {"kind": "vllm", "model": "smollm2-135m"}},
    "agents": [
        {"name": "ann", "kind": "llm", "engine": "main"},
        {"name": "bob", "kind": "llm", "engine": "main"},
        {"name": "dice", "kind": "random"},
    ],
}
RUN = RunRow("by-hand-d-1", "2026-01-01T00:00:00Z", json.dumps(CONFIG), "d", "{}")


def a_match(**changes: object) -> MatchRow:
    values: dict[str, object] = {
        "id": "m1",
        "pair_id": "p1",
        "game": "chess",
        "ruleset": "standard",
        "agent_first": "ann",
        "agent_second": "bob",
        "start_fen": "fen",
        "opening": "",
        "state": "running",
        "winner": None,
        "termination": None,
        "detail": None,
        "score_first": None,
        "score_second": None,
        "started": 9.0,
        "ended": None,
        "suspended_at": None,
        "suspended_s": 0.0,
        "number": 0,
    }
    return MatchRow(**{**values, **changes})  # type: ignore[arg-type]


def a_ply(ply: int, due: float, done: float) -> PlyRow:
    return PlyRow("m1", ply, ply % 2, "a2a3", "a3", "fen", None, due, due, done)


def an_attempt(ply: int, request: str = "0/0", **changes: object) -> AttemptRow:
    values: dict[str, object] = {
        "request_id": f"m1/{ply}/{request}",
        "match_id": "m1",
        "ply": ply,
        "side": ply % 2,
        "n": 0,
        "engine": "main",
        "mode": "free",
        "reply_text": "SECRET",
        "finish": "stop",
        "fault": None,
        "detail": "SECRET",
        "prompt_tokens": 100,
        "cached_tokens": 80,
        "completion_tokens": 5,
        "submitted": 10.125,
        "admitted": 10.25,
        "first_token": 10.5,
        "done": 10.875,
        "queue_s": 0.0625,
        "prefill_s": 0.125,
        "decode_s": 0.25,
    }
    return AttemptRow(**{**values, **changes})  # type: ignore[arg-type]


class Spans:
    """A tracer and what it made, in order of their ends: children before their parent."""

    def __init__(self, clock: RunClock | None = None) -> None:
        self._memory = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracer = Tracer(RUN, provider, clock=clock)

    def of(self, *rows: object) -> list[ReadableSpan]:
        self._memory.clear()
        self.tracer.add(rows)
        return list(self._memory.get_finished_spans())


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def times(span: ReadableSpan) -> tuple[float, float]:
    """Begin and end in seconds of the run, where its axis begins at `CREATED`."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9 - CREATED, span.end_time / 1e9 - CREATED


def test_a_move_is_a_span_with_its_attempts_as_children() -> None:
    spans = Spans()
    chat, move = spans.of(a_match(), an_attempt(0), a_ply(0, 10.0, 11.5))
    assert (move.name, move.kind, move.parent) == ("invoke_agent ann", SpanKind.INTERNAL, None)
    assert (chat.name, chat.kind) == ("chat smollm2-135m", SpanKind.CLIENT)
    assert chat.parent is not None
    assert move.context is not None
    assert (chat.parent.span_id, chat.parent.trace_id) == (
        move.context.span_id,
        move.context.trace_id,
    )
    assert times(move) == (10.0, 11.5)
    assert times(chat) == (10.125, 10.875)
    named = {
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "smollm2-135m",
        "gen_ai.agent.name": "ann",
        "gen_ai.conversation.id": "m1",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 80,
    }
    assert attributes(move) == named | {
        "gen_ai.operation.name": "invoke_agent",
        "boardfleet.game": "chess",
        "boardfleet.ply": 0,
        "boardfleet.side": 0,
        "boardfleet.late": True,
    }
    assert attributes(chat) == named | {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 0.375,
        "gen_ai.response.finish_reasons": ("stop",),
        "boardfleet.engine": "main",
        "boardfleet.mode": "free",
        "boardfleet.attempt": 0,
        "boardfleet.queue_seconds": 0.0625,
        "boardfleet.prefill_seconds": 0.125,
        "boardfleet.decode_seconds": 0.25,
    }
    assert {span.status.status_code for span in (chat, move)} == {StatusCode.UNSET}


def test_rows_of_one_batch_may_come_in_any_order_and_attempts_before() -> None:
    spans = Spans()
    made = spans.of(a_ply(0, 10.0, 10.5), an_attempt(0), an_attempt(1), a_match())
    assert [span.name for span in made] == ["chat smollm2-135m", "invoke_agent ann"]
    assert spans.of(an_attempt(1, "0/1")) == []
    made = spans.of(a_ply(1, 10.5, 11.0))
    assert [span.name for span in made] == ["chat smollm2-135m"] * 2 + ["invoke_agent bob"]
    assert attributes(made[-1])["gen_ai.usage.input_tokens"] == 200
    assert attributes(made[-1])["boardfleet.late"] is False


def test_an_attempt_written_twice_is_one_span() -> None:
    spans = Spans()
    assert spans.of(a_match(), an_attempt(0)) == []
    assert len(spans.of(an_attempt(0), a_ply(0, 10.0, 11.0))) == 2


def test_a_failed_attempt_has_its_fault_and_the_move_that_came_of_it_none() -> None:
    refused = an_attempt(0, "0/0", fault="illegal")
    lost = AttemptRow("m1/0/1/1", "m1", 0, 0, 1, "main", "free", fault="engine_dead", detail="x")
    good = an_attempt(0, "1/2", n=1, submitted=20.0, done=20.5, first_token=None)
    made = Spans().of(a_match(), refused, lost, good, a_ply(0, 19.0, 21.0))
    illegal, dead, chat, move = made
    assert [attributes(span).get("error.type") for span in made] == [
        "illegal",
        "engine_dead",
        None,
        None,
    ]
    assert illegal.status.status_code == dead.status.status_code == StatusCode.ERROR
    assert illegal.status.description == "illegal"
    assert times(dead) == (10.875, 20.0), "not known: from the one before to the next"
    assert times(move) == (10.125, 21.0), "not after its first attempt"
    assert "gen_ai.usage.input_tokens" not in attributes(dead)
    assert "gen_ai.response.time_to_first_chunk" not in attributes(chat)
    assert attributes(move)["gen_ai.usage.output_tokens"] == 10


def test_a_forfeit_is_a_span_that_ended_in_an_error() -> None:
    spans = Spans()
    attempts = [an_attempt(3, "0/0", fault="illegal"), an_attempt(3, "1/1", fault="unparsable")]
    ended = a_match(state="finished", termination="forfeit", ended=12.0)
    *_, move = spans.of(*attempts, ended)
    assert (move.name, times(move)) == ("invoke_agent bob", (10.125, 12.0))
    assert attributes(move)["error.type"] == "unparsable"
    assert move.status.status_code == StatusCode.ERROR
    assert "boardfleet.late" not in attributes(move)
    assert spans.of(ended) == []


def test_an_agent_without_an_engine_has_moves_and_no_model() -> None:
    (move,) = Spans().of(a_match(agent_first="dice"), a_ply(0, 10.0, 10.1))
    assert move.name == "invoke_agent dice"
    assert attributes(move)["gen_ai.provider.name"] == "boardfleet"
    assert "gen_ai.request.model" not in attributes(move)


def test_a_move_of_an_unknown_match_names_no_agent() -> None:
    chat, move = Spans().of(an_attempt(0), a_ply(0, 10.0, 11.0))
    assert (chat.name, move.name) == ("chat smollm2-135m", "invoke_agent")


def test_times_follow_the_process_that_played() -> None:
    def start(wall: str, offset_s: float) -> EventRow:
        return EventRow(offset_s, "process_start", json.dumps({"wall": wall, "offset_s": offset_s}))

    other = EventRow(0.0, "engine_ready", "{}")
    first = start("2026-01-01T00:00:10Z", 0.0)
    resumed = start("2026-01-02T00:00:00Z", 100.0)
    made = Spans().of(first, other, resumed, a_ply(0, 20.0, 21.0), a_ply(1, 120.0, 121.5))
    assert [times(span) for span in made] == [(30.0, 31.0), (86_420.0, 86_421.5)]


def test_in_the_process_that_plays_times_are_exact() -> None:
    clock = RunClock(offset=50.0)
    coarse = {"wall": "2020-01-01T00:00:00Z", "offset_s": clock.now()}
    spans = Spans(clock)
    before, now, after = time.time(), clock.now(), time.time()
    (span,) = spans.of(
        EventRow(now, "process_start", json.dumps(coarse)), a_ply(0, now, now + 0.25)
    )
    begun, ended = (at + CREATED for at in times(span))
    assert before - 0.05 <= begun <= after + 0.05
    assert ended - begun == pytest.approx(0.25, abs=1e-6)


class Collector:
    """Takes traces on a free port of this machine."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.payloads: list[bytes] = []
        self.answers = threading.Event()
        self.answers.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.answers.wait(30)
                if self.path == "/v1/traces":
                    collector.payloads.append(body)
                    collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.answers.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def resource(self) -> Mapping[str, str]:
        found = self.requests[0].resource_spans[0].resource.attributes
        return {entry.key: entry.value.string_value for entry in found}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    yield made
    made.close()


def moves(count: int) -> list[PlyRow | AttemptRow]:
    return [
        row for ply in range(count) for row in (an_attempt(ply), a_ply(ply, 10.0 + ply, 10.5 + ply))
    ]


def test_a_collector_receives_what_was_made(collector: Collector) -> None:
    tracer = open_tracer(RUN)
    hostile = "ann\ud800\0"
    with structlog.testing.capture_logs() as logs:
        tracer.add([a_match(agent_first=hostile), *moves(3)])
        tracer.close()
    spans = collector.spans()
    assert len(spans) == tracer.spans == 6
    assert {span.name for span in spans} == {
        f"invoke_agent {storable(hostile)}",
        "invoke_agent bob",
        "chat smollm2-135m",
    }
    (chat, move) = spans[:2]
    assert chat.parent_span_id == move.span_id
    assert move.start_time_unix_nano == round((CREATED + 10.0) * 1e9)
    values = {entry.key: entry.value for entry in chat.attributes}
    assert values["gen_ai.conversation.id"].string_value == "m1"
    assert values["gen_ai.usage.input_tokens"].int_value == 100
    assert values["boardfleet.decode_seconds"].double_value == 0.25
    resource = collector.resource()
    assert resource["service.name"] == "boardfleet"
    assert resource["boardfleet.run.name"] == "by-hand"
    assert resource["boardfleet.run.id"] == RUN.id
    assert not any(b"SECRET" in payload or b"a2a3" in payload for payload in collector.payloads)
    assert logs == []


def test_the_standard_variables_name_the_service(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    tracer = open_tracer(RUN)
    tracer.add(moves(1))
    tracer.close()
    resource = collector.resource()
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("mine", "lab")
    assert resource["boardfleet.run.id"] == RUN.id


def test_a_sampler_that_keeps_none_loses_none(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracer = open_tracer(RUN)
    with structlog.testing.capture_logs() as logs:
        tracer.add(moves(2))
        tracer.close()
    assert (tracer.spans, logs, collector.requests) == (0, [], [])


def test_a_collector_that_is_down_is_said_once_and_what_is_lost_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector.close()
    monkeypatch.setattr("arena.tracing.CLOSE_S", 0.3)
    tracer = open_tracer(RUN)
    begun = time.monotonic()
    with structlog.testing.capture_logs() as logs:
        tracer.add(moves(4))
        tracer.close()
    assert time.monotonic() - begun < 3.0
    trouble, lost = logs
    assert trouble["event"] == "collector_trouble"
    assert "refused" in trouble["reason"]
    assert (lost["event"], lost["lost"], lost["made"]) == ("spans_lost", 8, 8)
    assert caplog.records == [], "they would reach stderr, where the run is shown"


def test_a_slow_collector_holds_nobody_up_and_the_queue_is_bounded(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arena.tracing.CLOSE_S", 0.2)
    monkeypatch.setattr("arena.tracing._INTERRUPTED_S", 0.1)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    collector.answers.clear()
    tracer = open_tracer(RUN)
    begun = time.monotonic()
    with structlog.testing.capture_logs() as logs:
        for _ in range(10):
            tracer.add(moves(10))
        assert time.monotonic() - begun < 1.0
        tracer.close()
    assert time.monotonic() - begun < 3.0
    assert [entry["event"] for entry in logs] == ["collector_trouble", "spans_lost"]
    assert "Queue full" in logs[0]["reason"]
    assert logs[1]["lost"] == tracer.spans == 200


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"^spans need .*: install boardfleet\[otel\]$"):
        open_tracer(RUN)


def test_another_protocol_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"):
        open_tracer(RUN)
