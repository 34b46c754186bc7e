"""Scrapes of runs made by hand, each value worked out beside it, and of engines that misbehave."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from arena import metrics
from arena.distribution import Exact
from arena.figures import Figures
from arena.metrics import DEFINITIONS, LoopLag, Metrics
from arena.replicas import SILENT_S, STRAGGLER_MOVES
from arena.store import AttemptRow, EventRow, MatchRow, PlyRow, Row, RunRow, SampleRow
from serving import Bucket
from serving.telemetry import SPANS_S

GUIDE = Path(__file__).parents[2] / "docs/guides/metrics.md"
CONFIG = {
    "name": "by-hand",
    "pace": {"move_period_seconds": 1.0},
    "slo": {"move_seconds": 1.0},
    "engines": {
        "main": {"kind": "vllm", "max_concurrent": 8, "max_batched_tokens": 512},
        "spare": {"kind": "scripted", "max_concurrent": 4},
    },
    "agents": [
        {"name": "ann", "kind": "llm", "engine": "main", "mode": "constrained"},
        {"name": "bob", "kind": "llm", "engine": "main", "mode": "free"},
        {"name": "dice", "kind": "random"},
        {"name": "own", "kind": "module:Class", "engine": ["any"], "mode": {"any": 1}},
    ],
}


def a_match(name: str = "m1", **changes: object) -> MatchRow:
    values: dict[str, object] = {
        "id": name,
        "pair_id": "p1",
        "game": "chess",
        "ruleset": "standard",
        "agent_first": "ann",
        "agent_second": "bob",
        "start_fen": "fen",
        "opening": "",
        "state": "scheduled",
        "winner": None,
        "termination": None,
        "detail": None,
        "score_first": None,
        "score_second": None,
        "started": None,
        "ended": None,
        "suspended_at": None,
        "suspended_s": 0.0,
        "number": 0,
    }
    return MatchRow(**{**values, **changes})  # type: ignore[arg-type]


def an_attempt(ply: int, at: float, **changes: object) -> AttemptRow:
    """One that took 0.4 s until `at`, 0.1 of them in our queue, 0.3 in the engine."""
    values: dict[str, object] = {
        "request_id": f"m1/{ply}/{at}",
        "match_id": "m1",
        "ply": ply,
        "side": ply % 2,
        "n": 0,
        "engine": "main",
        "mode": "constrained",
        "reply_text": "e2e4",
        "prompt_tokens": 100,
        "cached_tokens": 80,
        "completion_tokens": 5,
        "submitted": at - 0.4,
        "admitted": at - 0.3,
        "done": at,
        "queue_s": 0.01,
        "prefill_s": 0.09,
        "decode_s": 0.2,
    }
    return AttemptRow(**{**values, **changes})  # type: ignore[arg-type]


def a_sample(at: float, requests: int, tokens: int, **changes: object) -> SampleRow:
    values: dict[str, object] = {
        "engine": "main",
        "at": at,
        "source": "per_step",
        "steps": 1,
        "replica": None,
        "running": 0,
        "waiting": 0,
        "step_requests": requests,
        "step_tokens": tokens,
        "kv_usage": 0.1,
        "prefix_queries": 0,
        "prefix_hits": 0,
        "preemptions": 0,
        "rejected": 0,
    }
    return SampleRow(**{**values, **changes})  # type: ignore[arg-type]


def a_second(at: float, **changes: object) -> Bucket:
    values: dict[str, object] = dict.fromkeys(Bucket._fields)
    values |= {"engine": "main", "span_s": SPANS_S[0], "at": at, "steps": 3, "in_flight": 2.5}
    values |= {"waiting_mean": 0.5, "kv_usage": 0.25, "rejected": 0, "offered": 3, "replies": 3}
    return Bucket(**{**values, "completion_tokens": 15, **changes})  # type: ignore[arg-type]


def a_ply(ply: int, ready: float, due: float, done: float) -> PlyRow:
    return PlyRow("m1", ply, ply % 2, "e2e4", "e4", "fen", None, ready, due, done)


def batches() -> list[list[Row]]:
    """A run as it came: a move of 0.45 s; one of 1.45 s with an illegal try; a restart of the
    engine; a resume, after which a move is due later than its first try was made; a flag fall."""
    running = a_match(state="running", started=10.0)
    ready = json.dumps({"engine": "main", "kind": "vllm", "version": "0.32.0"})
    restarted = json.dumps({"engine": "main", "restarts": 1})
    ended = {"state": "finished", "termination": "flag_fall", "winner": 1, "ended": 27.0}
    return [
        [EventRow(0.0, "engine_ready", ready), running],
        [an_attempt(0, 10.94), a_ply(0, 10.0, 10.5, 10.95), a_sample(10.0, 2, 50)],
        [
            an_attempt(1, 11.94, fault="illegal", cached_tokens=90, mode="free"),
            an_attempt(1, 12.94, n=1, cached_tokens=100, mode="free"),
            a_ply(1, 10.955, 11.5, 12.95),
            a_sample(12.0, 4, 90, steps=3, preemptions=2, rejected=1),
            a_second(12.0),
        ],
        [
            EventRow(13.0, "engine_restarted", restarted),
            a_sample(13.5, 4, 600, preemptions=1),
            an_attempt(2, 14.0, fault="illegal"),
        ],
        [an_attempt(2, 24.0, n=1), a_ply(2, 20.0, 23.5, 24.01), a_second(23.0)],
        [an_attempt(3, 26.0, fault="rejected", reply_text=None, submitted=None)],
        [running._replace(**ended)],  # type: ignore[arg-type]
    ]


def answers_of_replicas() -> list[Row]:
    """To a match that moved from one to another."""
    of: dict[str, object] = {"match_id": "m2", "engine": "spare"}
    return [
        an_attempt(0, 1.3, **of, replica="k3v9x2ab"),
        an_attempt(1, 1.9, **of, replica="10.0.0.7:8000", cached_tokens=50),
    ]


MATCHES = (
    a_match(),
    a_match(
        "m2", game="janggi", ruleset="janggi", agent_first="own", agent_second="dice", number=1
    ),
)


def figures_of(rows: Iterable[Row], *, exact: bool = False, **config: object) -> Figures:
    run = RunRow(
        "r", "2026-01-01T00:00:00Z", json.dumps({**CONFIG, **config}), "d", '{"boardfleet": "1"}'
    )
    figures = Figures(run, MATCHES, exact=exact)
    figures.add(rows)
    return figures


def metrics_of(figures: Figures, **changes: Any) -> Metrics:
    given: dict[str, Any] = {"verdict": lambda: None, "now": lambda: 24.5}
    return Metrics(figures, changes.pop("lag", None), **{**given, **changes})


def series(text: str) -> dict[str, float]:
    """Values by name and labels, as they stand."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def scrape_by_hand() -> str:
    """One that has every metric of ours."""
    lag = LoopLag()
    lag.sketch.add(640.0)
    figures = figures_of(row for batch in batches()[:-1] for row in batch)
    figures.add(answers_of_replicas())
    figures.add([MATCHES[1]._replace(state="finished", termination="draw", started=1.0, ended=2.0)])
    return await metrics_of(figures, lag=lag).text()


async def test_every_metric_that_is_defined_is_scraped_as_it_is_defined() -> None:
    families = {family.name: family for family in parsed(await scrape_by_hand())}
    assert families.keys() == {d.name.removesuffix("_total") for d in DEFINITIONS}
    for name, kind, labels, meaning in DEFINITIONS:
        family = families[name.removesuffix("_total")]
        assert (family.type, family.documentation) == (kind, meaning)
        assert {frozenset(sample.labels) - {"le"} for sample in family.samples} == {
            frozenset(labels)
        }


def parsed(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def test_names_and_labels_keep_to_the_conventions() -> None:
    assert len({d.name for d in DEFINITIONS}) == len(DEFINITIONS)
    for name, kind, labels, meaning in DEFINITIONS:
        assert name.startswith("arena_")
        assert name.endswith("_total") == (kind == "counter")
        assert not {"agent", "match", "name"} & set(labels) or name == "arena_info"
        assert name.endswith("_seconds") == ("seconds." in meaning and kind == "histogram")
        assert meaning.endswith(".")


async def test_a_move_s_time_is_counted_in_its_bucket_and_those_above() -> None:
    at = series(await scrape_by_hand())
    labels = 'engine="main",game="chess"'
    counts = [
        at[f'arena_move_latency_seconds_bucket{{{labels},le="{edge}"}}']
        for edge in ("0.01", "0.32", "0.64", "1.28", "2.56", "81.92", "+Inf")
    ]
    assert counts == [0, 0, 2, 2, 3, 3, 3]  # 0.45 s, 0.51 s, 1.45 s
    assert at[f"arena_move_latency_seconds_sum{{{labels}}}"] == pytest.approx(0.45 + 0.51 + 1.45)
    assert at[f"arena_move_latency_seconds_count{{{labels}}}"] == 3
    # 0.3 s of two tries were decoded in 0.4
    assert at[f"arena_move_decode_seconds_sum{{{labels}}}"] == pytest.approx(0.2 + 0.4 + 0.4)
    # 0.1 s of ours and 0.01 of the engine's, twice that for two tries
    assert at[f'arena_move_queue_seconds_bucket{{{labels},le="0.16"}}'] == 1
    # of the first: 0.45 less 0.4, and 5 ms of commit; the last one's commit is not known yet
    assert at[f'arena_move_harness_seconds_bucket{{{labels},le="0.08"}}'] >= 1


async def test_moves_faults_and_refusals_are_counted() -> None:
    at = series(await scrape_by_hand())
    assert at['arena_moves_total{game="chess",mode="constrained"}'] == 2
    assert at['arena_moves_total{game="chess",mode="free"}'] == 1
    assert at['arena_moves_total{game="janggi",mode="none"}'] == 0
    assert at["arena_moves_in_time_total"] == 2
    assert at["arena_moves_due_total"] == 3
    assert at["arena_moves_in_time_ratio"] == pytest.approx(2 / 3)
    assert at['arena_illegal_moves_total{game="chess",mode="free"}'] == 1
    assert at['arena_faults_total{blame="agent",kind="illegal"}'] == 2
    assert at['arena_faults_total{blame="infrastructure",kind="rejected"}'] == 1
    assert at['arena_faults_total{blame="infrastructure",kind="stalled"}'] == 0
    assert at['arena_rejected_total{engine="main",reason="rejected"}'] == 1
    assert at['arena_rejected_total{engine="main",reason="overloaded"}'] == 1
    assert at['arena_matches{state="running"}'] == 1
    assert at['arena_matches_finished_total{game="janggi",termination="draw"}'] == 1
    assert at['arena_info{name="by-hand",version="1"}'] == 1


async def test_an_engine_s_steps_and_tokens_are_counted() -> None:
    at = series(await scrape_by_hand())
    requests = [
        at[f'arena_batch_occupancy_requests_bucket{{engine="main",le="{edge}"}}']
        for edge in ("1", "2", "4", "1024", "+Inf")
    ]
    assert requests == [0, 1, 5, 5, 5]  # 2 in one step, 4 in three and one
    assert at['arena_batch_occupancy_requests_sum{engine="main"}'] == 18
    assert at['arena_batch_tokens_bucket{engine="main",le="512"}'] == 4
    assert at['arena_batch_tokens_sum{engine="main"}'] == 50 + 3 * 90 + 600
    assert at['arena_preemptions_total{engine="main"}'] == 3  # 2, and 1 after the restart
    assert at['arena_engine_restarts_total{engine="main"}'] == 1
    assert at['arena_prompt_tokens_total{engine="main",game="chess"}'] == 600
    assert at['arena_completion_tokens_total{engine="main",game="chess"}'] == 30
    assert at['arena_prefix_hit_ratio{engine="main"}'] == pytest.approx(510 / 600)
    assert at['arena_batch_limit_requests{engine="spare"}'] == 4


async def test_replicas_are_told_apart_where_there_are_several() -> None:
    figures = figures_of(row for batch in batches() for row in batch)
    first, *rest = answers_of_replicas()
    figures.add([first, a_ply(0, 0.5, 0.9, 1.4)._replace(match_id="m2"), *rest])
    at = series(await metrics_of(figures).text())
    one, other = (f'{{engine="spare",replica="{name}"}}' for name in ("k3v9x2ab", "10.0.0.7:8000"))
    assert at['arena_matches_moved_total{engine="spare"}'] == 1
    assert (at[f"arena_replica_matches{one}"], at[f"arena_replica_matches{other}"]) == (1, 1)
    assert at[f"arena_replica_moves_total{one}"] == 1
    assert at[f"arena_replica_moves_total{other}"] == 0
    assert at[f"arena_replica_engine_seconds_total{one}"] == pytest.approx(0.29)
    assert at[f"arena_replica_prefix_hit_ratio{other}"] == pytest.approx(0.5)
    assert at[f"arena_replica_straggler{one}"] == 0
    assert not any("replica" in name and 'engine="main"' in name for name in at)


async def test_a_straggler_is_one_while_it_answers() -> None:
    """An alert on one that had ended rang until the run did."""
    figures = figures_of(())
    on: dict[str, object] = {"match_id": "m2", "engine": "spare"}
    for ply in range(4 * STRAGGLER_MOVES):
        slow, at_s = ply % 4 > 1, float(ply)
        of = on | {"replica": "slow" if slow else "quick", "decode_s": 0.9 if slow else 0.2}
        figures.add([an_attempt(ply, at_s, **of)])
        figures.add([a_ply(ply, at_s, at_s, at_s)._replace(match_id="m2")])
    name = 'arena_replica_straggler{engine="spare",replica="slow"}'
    assert series(await metrics_of(figures).text())[name] == 1
    figures.add([an_attempt(ply + 1, at_s + SILENT_S + 1.0, **on, replica="quick")])
    assert series(await metrics_of(figures).text())[name] == 0
    (row,) = [row for row in spare_replicas(figures) if row["replica"] == "slow"]
    assert row["is_straggler"], "of the run it is one"


def spare_replicas(figures: Figures) -> list[dict[str, Any]]:
    section = figures.engines["spare"].replicas.section()
    assert section is not None
    rows: list[dict[str, Any]] = section["rows"]
    return rows


async def test_a_batch_is_of_one_replica_and_the_limit_of_all() -> None:
    hosted = {"kind": "scripted", "max_concurrent": 4}
    engines = {"main": {"kind": "ray", "replicas": 3, "max_concurrent": 12, "engine": hosted}}
    at = series(await metrics_of(figures_of((), engines=engines)).text())
    assert at['arena_batch_limit_requests{engine="main"}'] == 4
    assert at['arena_concurrency_limit_requests{engine="main"}'] == 12


async def test_histograms_are_cumulative_and_end_in_inf() -> None:
    text = await scrape_by_hand()
    found = 0
    for family in parsed(text):
        if family.type != "histogram":
            continue
        by_labels: dict[str, dict[str, float]] = {}
        for sample in family.samples:
            rest = {key: value for key, value in sample.labels.items() if key != "le"}
            part = sample.labels.get("le", sample.name.rpartition("_")[2])
            by_labels.setdefault(str(rest), {})[part] = sample.value
        for counts in by_labels.values():
            found += 1
            count, _ = counts.pop("count"), counts.pop("sum")
            edges = [float(edge) for edge in counts]
            assert edges == sorted(edges)
            assert list(counts.values()) == sorted(counts.values())
            assert counts["+Inf"] == count > 0
    assert found == 5 + 2 + 2


async def test_nothing_that_counts_goes_down() -> None:
    figures = figures_of(())
    of_run = metrics_of(figures)
    before: dict[str, float] = {}
    num_counted = []
    for rows in batches():
        figures.add(rows)
        now = {
            name: value
            for family in parsed(await of_run.text())
            if family.type in ("counter", "histogram")
            for name, value in ((f"{s.name}{s.labels}", s.value) for s in family.samples)
        }
        assert before.keys() <= now.keys()
        assert {name: value for name, value in before.items() if now[name] < value} == {}
        before = now
        num_counted.append(sum(now.values()))
    assert num_counted == sorted(num_counted)
    assert num_counted[0] < num_counted[-1]


async def test_exact_figures_give_the_same_scrape() -> None:
    rows = [row for batch in batches() for row in batch]
    sketched = await metrics_of(figures_of(rows)).text()
    exact = figures_of(rows, exact=True)
    assert isinstance(exact.schedule_lag, Exact)
    assert await metrics_of(exact).text() == sketched


async def test_what_is_not_known_is_absent_and_what_has_not_happened_is_0() -> None:
    at = series(await metrics_of(figures_of(())).text())
    assert at['arena_moves_total{game="chess",mode="constrained"}'] == 0
    assert at['arena_flag_falls_total{game="janggi"}'] == 0
    assert at['arena_saturated{engine="main",signal="queueing"}'] == 0
    assert at['arena_engine_restarts_total{engine="spare"}'] == 0
    unknown = (
        "arena_move",
        "arena_batch_o",
        "arena_batch_t",
        "arena_kv",
        "arena_pre",
        "arena_requests",
        "arena_pace",
        "arena_event_loop",
        'arena_rejected_total{engine="main",reason="overloaded"}',
    )
    assert [name for name in at if name.startswith(unknown) and "moves" not in name] == []
    assert "arena_moves_in_time_ratio" not in at


async def test_a_flag_fall_is_counted_by_its_game() -> None:
    at = series(await metrics_of(figures_of(row for b in batches() for row in b)).text())
    assert at['arena_flag_falls_total{game="chess"}'] == 1
    assert at['arena_flag_falls_total{game="janggi"}'] == 0
    assert at["arena_moves_due_total"] == 4


async def test_a_second_long_past_says_nothing_of_now() -> None:
    rows = [row for batch in batches()[:-1] for row in batch]
    now = 24.5
    of_run = metrics_of(figures_of(rows), now=lambda: now)
    at = series(await of_run.text())
    assert at['arena_requests_in_flight{engine="main"}'] == 2.5
    assert at['arena_requests_waiting{engine="main"}'] == 0.5
    assert at['arena_kv_usage_ratio{engine="main"}'] == 0.25
    now = 30.0
    at = series(await of_run.text())
    assert at['arena_requests_in_flight{engine="main"}'] == 0
    assert at['arena_requests_waiting{engine="main"}'] == 0
    assert 'arena_kv_usage_ratio{engine="main"}' not in at


async def test_no_request_is_in_flight_once_no_match_is_played() -> None:
    rows = [row for batch in batches() for row in batch]
    at = series(await metrics_of(figures_of(rows)).text())
    assert at['arena_requests_in_flight{engine="main"}'] == 0


async def test_the_verdict_s_signal_stands_alone() -> None:
    verdict = {"engine": "main", "signal": "queueing"}
    at = series(await metrics_of(figures_of(()), verdict=lambda: verdict).text())
    standing = [name for name, value in at.items() if "saturated" in name and value]
    assert standing == ['arena_saturated{engine="main",signal="queueing"}']


async def test_hostile_names_are_text() -> None:
    name = 'a"} 1\n\\x\ud800\0'
    text = await metrics_of(figures_of((), name=name)).text()
    assert text.encode()
    (info,) = (family for family in parsed(text) if family.name == "arena_info")
    assert info.samples[0].labels["name"].rstrip("\ufffd") == 'a"} 1\n\\x'


OWN_TEXT = """\
# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# HELP vllm:prompt_tokens_total Tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 7.0
# HELP vllm:prompt_tokens_created Tokens.
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
# HELP vllm:iteration_tokens_total Odd names stay.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 1.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 2.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 9.0
"""


class Telling:
    """An engine that answers as it is told."""

    def __init__(self, say: Callable[[], Awaitable[Any]]) -> None:
        self._say = say

    async def metrics(self) -> str:
        return await self._say()  # type: ignore[no-any-return]


def saying(text: object) -> Telling:
    async def say() -> object:
        return text

    return Telling(say)


async def theirs(engines: Mapping[str, Telling]) -> str:
    """What a scrape says beyond ours."""
    of_run = metrics_of(figures_of(()))
    ours = await of_run.text()
    of_run.attach(engines)
    text = await of_run.text()
    assert text.startswith(ours)
    return text.removeprefix(ours)


async def test_one_engine_s_own_metrics_stand_as_they_are() -> None:
    assert await theirs({"main": saying(OWN_TEXT)}) == OWN_TEXT
    assert await theirs({"main": saying(OWN_TEXT.rstrip())}) == OWN_TEXT
    assert await theirs({"main": saying("")}) == ""


async def test_several_engines_own_metrics_are_merged_and_told_apart() -> None:
    both = await theirs({"main": saying(OWN_TEXT), "spare": saying(OWN_TEXT)})
    families = parsed(both)
    assert [f.name for f in families] == [f.name for f in parsed(OWN_TEXT)]
    assert both.count("# TYPE") == OWN_TEXT.count("# TYPE")
    at = series(both)
    for name, value in series(OWN_TEXT).items():
        for engine in ("main", "spare"):
            assert at[name.replace("{", f'{{arena_engine="{engine}",')] == value
    assert len(at) == 2 * len(series(OWN_TEXT))


async def test_of_several_engines_one_that_is_down_changes_no_other_s_labels() -> None:
    left = await theirs({"main": saying(OWN_TEXT), "spare": saying("")})
    assert left == OWN_TEXT.replace("{", '{arena_engine="main",')


async def never() -> str:
    await asyncio.get_running_loop().create_future()
    return "late"


async def broken() -> str:
    raise RuntimeError("no metrics today")


async def cancelled() -> str:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "bad",
    [
        Telling(never),
        Telling(broken),
        Telling(cancelled),
        saying(None),
        saying(b"bytes"),
        saying("no metrics {at all\n"),
        saying("# TYPE x nonsense\nx 1\n"),
    ],
    ids=["hangs", "raises", "cancels", "none", "bytes", "garbage", "bad type"],
)
async def test_an_engine_that_misbehaves_costs_only_its_own_metrics(
    bad: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "ENGINE_S", 0.05)
    said = await theirs({"bad": bad, "main": saying(OWN_TEXT)})
    assert said == OWN_TEXT.replace("{", '{arena_engine="main",')


async def test_a_scrape_that_is_given_up_leaves_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    of_run = metrics_of(figures_of(()))
    of_run.attach({"main": Telling(never)})
    scraping = asyncio.create_task(of_run.text())
    await asyncio.sleep(0)
    scraping.cancel()
    await asyncio.gather(scraping, return_exceptions=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_cannot_be_encoded_in_an_engine_s_text_is_replaced() -> None:
    said = (await theirs({"main": saying("# \ud800\nup 1.0\n")})).encode()
    assert said.decode().replace("\ufffd", "") == "# \nup 1.0\n"


async def test_what_cannot_be_read_is_left_out_and_costs_nothing_else() -> None:
    """Prometheus would refuse the whole scrape, ours included."""
    assert await theirs({"main": saying("<html>502</html>\n")}) == ""


async def test_a_blocked_loop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LAG_PERIOD_S", 0.001)
    lag = LoopLag()
    measuring = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    until = time.monotonic() + 0.03
    while time.monotonic() < until:  # nobody else gets the loop
        pass
    for _ in range(100):  # passes of the loop
        await asyncio.sleep(0)
    measuring.cancel()
    assert lag.sketch.greatest >= 25
    at = series(await metrics_of(figures_of(()), lag=lag).text())
    # passes of the loop after it may be measured too
    assert at['arena_event_loop_lag_seconds_bucket{le="0.02"}'] < lag.sketch.count
    assert at['arena_event_loop_lag_seconds_bucket{le="+Inf"}'] == lag.sketch.count


async def test_a_scrape_of_128_agents_costs_less_than_20_ms() -> None:
    figures = a_big_run()
    assert (len(figures.agents), len(figures.active)) == (128, 64)
    of_run = metrics_of(figures)
    costs = []
    for _ in range(10):
        begun = time.process_time()
        text = await of_run.text()
        costs.append(time.process_time() - begun)
    assert 'arena_move_harness_seconds_count{engine="main",game="chess"} 3136.0' in text
    assert min(costs) < 0.02


def a_big_run() -> Figures:
    """128 agents in 64 matches, with latencies as spread as they ever are."""
    agents = [
        {"name": f"a{n}", "kind": "llm", "engine": "main", "mode": "free"} for n in range(128)
    ]
    config = {**CONFIG, "agents": agents}
    run = RunRow("r", "2026-01-01T00:00:00Z", json.dumps(config), "d", "{}")
    matches = [
        a_match(
            f"m{n}", agent_first=f"a{2 * n}", agent_second=f"a{2 * n + 1}", state="running",
            started=0.0, number=n,
        )
        for n in range(64)
    ]  # fmt: skip
    figures = Figures(run, matches, exact=False)
    figures.add(matches)
    dice = random.Random(0)
    for ply in range(50):
        figures.add(row for match in matches for row in a_move(match, ply, dice))
    return figures


def a_move(match: MatchRow, ply: int, dice: random.Random) -> Sequence[Row]:
    queue, prefill, decode, harness = (dice.lognormvariate(mu, 1.0) for mu in (-3, -2, -1.5, -5))
    done = ply + queue + prefill + decode
    attempt = an_attempt(
        ply, done, request_id=f"{match.id}/{ply}", match_id=match.id, submitted=float(ply),
        admitted=float(ply), queue_s=queue, prefill_s=prefill, decode_s=decode,
    )  # fmt: skip
    move = PlyRow(
        match.id, ply, ply % 2, "e2e4", "e4", "fen", None, float(ply), float(ply), done + harness
    )
    return attempt, move


def test_the_guide_lists_what_there_is() -> None:
    """Paste what this prints when it fails."""
    lines = [
        f"| `{name}` | {kind} | {', '.join(labels) or '-'} | {meaning} |"
        for name, kind, labels, meaning in DEFINITIONS
    ]
    held = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `arena_")]
    assert held == lines, "\n".join(lines)
