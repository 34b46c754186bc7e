"""OpenTelemetry spans of a run, made from the rows that its store has committed.

A move is one span, `invoke_agent {agent}` from when it was due until it was decided, with a child
`chat {model}` for each attempt, after the GenAI conventions (gen-ai-agent-spans.md and
gen-ai-spans.md of open-telemetry/semantic-conventions-genai; status: development). The match is the
conversation. A forfeit, which is no move, is a span that ended in an error. What was asked and
answered is in no span.

`gen_ai.provider.name` is the engine's kind ("vllm"), a value of our own as the conventions allow,
and "boardfleet" for an agent that asks no engine. `error.type` is our name of a fault.
`boardfleet.*` is what the conventions have no name for; durations are seconds.
"""

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import structlog

from arena.store import AttemptRow, EventRow, MatchRow, PlyRow, RunClock, RunRow, storable
from arena.wall_time import WallTime

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

CLOSE_S = 5.0
"""How long `Tracer.close` waits for a collector to take the last spans."""
_INTERRUPTED_S = 1.0
_PROTOCOL = "http/protobuf"
_LIBRARY_LOG = logging.getLogger("opentelemetry")

log = structlog.get_logger()


class Delivery:
    """Passes spans on to an exporter, and knows how many arrived and what went wrong first."""

    def __init__(self, exporter: "SpanExporter") -> None:
        self.arrived = 0
        self.trouble = _FirstComplaint()
        self._exporter = exporter

    def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
        result = self._exporter.export(spans)
        if result.name == "SUCCESS":
            self.arrived += len(spans)
        return result

    def shutdown(self) -> None:
        """Also ends a wait for a collector to come back."""
        self._exporter.shutdown()


class _FirstComplaint(logging.Handler):
    """Keeps the library's warnings off stderr, where a run is being shown, and holds the first."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        _LIBRARY_LOG.addHandler(self)
        _LIBRARY_LOG.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or " ".join(record.getMessage().split())

    def detach(self) -> None:
        _LIBRARY_LOG.removeHandler(self)
        _LIBRARY_LOG.propagate = True


class _Move(NamedTuple):
    """What an agent was asked, and how it went."""

    match_id: str
    ply: int
    side: int
    attempts: Sequence[AttemptRow]
    begun: float
    done: float
    is_late: bool | None
    fault: str | None
    """Why no move came of it."""


class Tracer:
    """Makes spans of rows and hands them to a provider. Use from one thread."""

    def __init__(
        self,
        run: RunRow,
        provider: "TracerProvider",
        *,
        clock: RunClock | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        """`clock`: the run's, in the process that plays it; times of spans are exact then.
        `delivery`: the provider's, to report what it loses."""
        from opentelemetry import trace

        config = json.loads(run.config_json)
        self._engines: Mapping[str, Mapping[str, Any]] = config.get("engines", {})
        self._engine_of = {agent["name"]: agent.get("engine") for agent in config.get("agents", ())}
        self._slo_s: float = config["slo"]["move_seconds"]
        self._wall = WallTime(run.created, clock)
        self._api = trace
        self._provider = provider
        self._tracer = provider.get_tracer("boardfleet")
        self._root = trace.set_span_in_context(trace.INVALID_SPAN)
        self._delivery = delivery
        self._matches: dict[str, MatchRow] = {}
        self._attempts: dict[str, dict[int, dict[str, AttemptRow]]] = {}
        """Of moves still open: by match, ply and request."""
        self._has_complained = False
        self.spans = 0
        """Made so far."""

    def add(self, rows: Sequence[object]) -> None:
        """Take committed rows; a ply's attempts come with it or before. Other rows are passed over.

        Never waits for a collector: what does not fit into the queue before it is lost.
        """
        plies: list[PlyRow] = []
        ended: list[MatchRow] = []
        for row in rows:
            if isinstance(row, PlyRow):
                plies.append(row)
            elif isinstance(row, AttemptRow):
                open_plies = self._attempts.setdefault(row.match_id, {})
                open_plies.setdefault(row.ply, {})[row.request_id] = row
            elif isinstance(row, MatchRow):
                self._matches[row.id] = row
                if row.state == "finished":
                    ended.append(row)
            elif isinstance(row, EventRow) and row.kind == "process_start":
                self._wall.note_start(row)
        for ply in plies:
            self._record(self._move(ply))
        for match in ended:
            for move in self._forfeits(match):
                self._record(move)
            del self._matches[match.id]
        self._report_trouble()

    def close(self) -> None:
        """Deliver what is left, in some seconds at most, and log what was lost.

        Blocks meanwhile: call it in a thread.
        """
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        self._report_trouble()
        delivery = self._delivery
        if delivery is None:
            return
        if closing.is_alive():
            delivery.shutdown()
            closing.join(_INTERRUPTED_S)
        if lost := self.spans - delivery.arrived:
            log.warning("spans_lost", lost=lost, made=self.spans)
        delivery.trouble.detach()

    def _report_trouble(self) -> None:
        reason = self._delivery.trouble.text if self._delivery is not None else ""
        if reason and not self._has_complained:
            self._has_complained = True
            log.warning("collector_trouble", reason=reason)

    def _move(self, ply: PlyRow) -> _Move:
        attempts = tuple(self._attempts.get(ply.match_id, {}).pop(ply.ply, {}).values())
        asked = [a.submitted for a in attempts if a.submitted is not None]
        # an attempt made before the run was interrupted is older than the due time of the next try
        begun = min(ply.due, *asked) if asked else ply.due
        is_late = ply.done - ply.due > self._slo_s
        return _Move(
            ply.match_id, ply.ply, ply.side, attempts, begun, ply.done, is_late, fault=None
        )

    def _forfeits(self, match: MatchRow) -> Iterator[_Move]:
        """What is left open when a match has ended: the attempts of which no move came."""
        for number, open_ply in self._attempts.pop(match.id, {}).items():
            attempts = tuple(open_ply.values())
            done = match.ended if match.ended is not None else 0.0
            begun = min((a.submitted for a in attempts if a.submitted is not None), default=done)
            fault = next((a.fault for a in reversed(attempts) if a.fault), "_OTHER")
            yield _Move(
                match.id, number, attempts[0].side, attempts, begun, done, is_late=None, fault=fault
            )

    def _record(self, move: _Move) -> None:
        match = self._matches.get(move.match_id)
        agent = match.agents[move.side] if match is not None else None
        engine = next((a.engine for a in move.attempts), self._engine_of.get(agent))
        named = self._names(engine, agent, move.match_id)
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            **named,
            "gen_ai.usage.input_tokens": _total(a.prompt_tokens for a in move.attempts),
            "gen_ai.usage.output_tokens": _total(a.completion_tokens for a in move.attempts),
            "gen_ai.usage.cache_read.input_tokens": _total(a.cached_tokens for a in move.attempts),
            "error.type": move.fault,
            "boardfleet.game": match.game if match is not None else None,
            "boardfleet.ply": move.ply,
            "boardfleet.side": move.side,
            "boardfleet.late": move.is_late,
        }
        span = self._start("invoke_agent", agent, self._root, attributes, move.begun)
        inside = self._api.set_span_in_context(span)
        for attempt, begun, done in _timed(move):
            asked = {"gen_ai.operation.name": "chat", **named, **_asked(attempt)}
            model = named["gen_ai.request.model"]
            chat = self._start("chat", model, inside, asked, begun)
            self._end(chat, attempt.fault, done)
        self._end(span, move.fault, move.done)

    def _names(self, engine: str | None, agent: str | None, match_id: str) -> dict[str, Any]:
        table = self._engines.get(engine or "", {})
        return {
            "gen_ai.provider.name": table.get("kind", "boardfleet"),
            "gen_ai.request.model": table.get("model"),
            "gen_ai.agent.name": agent,
            "gen_ai.conversation.id": match_id,
        }

    def _start(
        self,
        operation: str,
        subject: str | None,
        context: Any,
        attributes: Mapping[str, Any],
        begun: float,
    ) -> Any:
        kinds = self._api.SpanKind
        span = self._tracer.start_span(
            storable(f"{operation} {subject}" if subject else operation),
            context,
            kinds.CLIENT if operation == "chat" else kinds.INTERNAL,
            {
                key: storable(value) if isinstance(value, str) else value
                for key, value in attributes.items()
                if value is not None
            },
            start_time=self._wall.ns(begun),
        )
        self.spans += span.is_recording()
        return span

    def _end(self, span: Any, fault: str | None, done: float) -> None:
        if fault is not None:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, fault))
        span.end(self._wall.ns(done))


def check_installed() -> None:
    """ValueError, one line, where spans cannot be sent: the extra is not installed, or the OTEL_*
    variables ask for another protocol."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise ValueError(
            "spans need OpenTelemetry, which is not installed: install boardfleet[otel]"
        ) from None
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (protocol := os.environ.get(name) or _PROTOCOL) != _PROTOCOL:
            raise ValueError(f"{name} is {protocol!r}; spans are sent by {_PROTOCOL} alone")


def open_tracer(run: RunRow, clock: RunClock | None = None) -> Tracer:
    """A tracer that sends to a collector by OTLP over HTTP, as the standard OTEL_* variables say.

    The service is `boardfleet` unless they name it. Raises ValueError, one line, where the extra
    is not installed or the variables ask for another protocol.
    """
    check_installed()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    delivery = Delivery(OTLPSpanExporter())
    of_run = Resource.create(
        {
            "service.name": "boardfleet",
            "service.version": version("boardfleet"),
            "boardfleet.run.id": storable(run.id),
            "boardfleet.run.name": storable(json.loads(run.config_json)["name"]),
        }
    )
    # what the user's variables say stands
    resource = of_run.merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(cast("SpanExporter", delivery)))
    return Tracer(run, provider, clock=clock, delivery=delivery)


def _asked(attempt: AttemptRow) -> dict[str, Any]:
    """Attributes of one question to an engine; None: not known."""
    first_chunk = None
    if attempt.first_token is not None and attempt.submitted is not None:
        first_chunk = attempt.first_token - attempt.submitted
    return {
        "gen_ai.request.stream": True if first_chunk is not None else None,
        "gen_ai.response.time_to_first_chunk": first_chunk,
        "gen_ai.response.finish_reasons": (attempt.finish,) if attempt.finish else None,
        "gen_ai.usage.input_tokens": attempt.prompt_tokens,
        "gen_ai.usage.output_tokens": attempt.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": attempt.cached_tokens,
        "error.type": attempt.fault,
        "boardfleet.engine": attempt.engine,
        "boardfleet.mode": attempt.mode,
        "boardfleet.attempt": attempt.n,
        "boardfleet.queue_seconds": attempt.queue_s,
        "boardfleet.prefill_seconds": attempt.prefill_s,
        "boardfleet.decode_seconds": attempt.decode_s,
    }


def _timed(move: _Move) -> Iterator[tuple[AttemptRow, float, float]]:
    """The attempts with begin and end; one without a reply lasted from the one before to the next,
    for its times are not kept."""
    end = move.begun
    for number, attempt in enumerate(move.attempts):
        begun = attempt.submitted if attempt.submitted is not None else end
        later = (a.submitted for a in move.attempts[number + 1 :] if a.submitted is not None)
        end = attempt.done if attempt.done is not None else next(later, move.done)
        yield attempt, begun, end


def _total(counts: Iterator[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
