"""`arena simulate batching` and `paging`: the vectors, the command line, the text and the page."""

import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arena import simulate, simulate_page, simulate_text
from arena.simulate import BatchingOptions, PagingOptions, batching, paging
from arena.simulate_fleet import EngineOptions, FleetOptions, OverloadOptions, fleet, overload
from arena.simulate_text import WAYS, sparkline, tables
from arena.terminal import print_simulation
from serving.step_time import StepTime
from tests.arena.simulated_runs import WORK, play
from tests.arena.test_run import arena

VECTOR = {
    "static": ((151.36, 260.13, 272.69), 326.4, 1.84, 0.640),
    "continuous": ((34.62, 60.26, 66.79), 120.3, 4.99, 0.022),
}
"""Of 600 requests: mean, p95 and greatest wait, makespan, requests a second, idle share."""


@pytest.fixture(scope="module")
def banded() -> dict[str, Any]:
    """The default simulation, over 200 seeds."""
    return batching(BatchingOptions(seeds=200))


# the vectors


@pytest.mark.parametrize("way", VECTOR)
def test_every_figure_of_600_requests_is_inside_the_band_of_seeds(
    banded: dict[str, Any], way: str
) -> None:
    waits, makespan_s, per_s, idle = VECTOR[way]
    band = banded[way]["band"]
    told = [*(band["wait_s"][key] for key in ("mean", "p95", "max"))]
    told += [band["makespan_s"], band["requests_per_s"], band["idle_share"]]
    for (low, high), figure in zip(told, (*waits, makespan_s, per_s, idle), strict=True):
        assert low <= figure <= high


def test_equal_lengths_remove_the_gain() -> None:
    result = batching(BatchingOptions(lengths="150", seeds=200))
    static, continuous = (result[way] for way in WAYS["batching"])
    # but for one step of 8 ms
    assert static["makespan_s"] == pytest.approx(continuous["makespan_s"], abs=0.009)
    assert static["requests_per_s"] == pytest.approx(continuous["requests_per_s"], rel=1e-3)
    for way, mean in (("static", 19.67), ("continuous", 19.38)):
        low, high = result[way]["band"]["wait_s"]["mean"]
        assert low <= mean <= high
        low, high = result[way]["band"]["makespan_s"]
        assert low <= 91.0 <= high
    # what is left is waiting for the batch to fill: (slots - 1) / 2 at 12 a second
    gained = static["wait_s"]["mean"] - continuous["wait_s"]["mean"]
    assert gained == pytest.approx(7 / 2 / 12, rel=0.2)


def test_the_units_of_the_shipped_lengths() -> None:
    result = paging(PagingOptions())
    assert [row["unit"] for row in result["units"]] == [4096, 1024, 256, 64, 16]
    assert result["units"][0]["reserved"] == 81_920_000
    totals = (81_920_000, 26_132_480, 13_992_448, 11_958_528, 11_486_464)
    for row, total, fit in zip(result["units"], totals, (30, 94, 175, 205, 213), strict=True):
        assert row["reserved"] == pytest.approx(total, rel=0.01)
        assert abs(row["fit"] - fit) <= 1
    assert result["used"] == pytest.approx(11_336_014, rel=0.01)


# what the options do


def test_the_same_seed_is_the_same_simulation() -> None:
    options = BatchingOptions(requests=100, seed=3)
    assert batching(options) == batching(options) != batching(BatchingOptions(requests=100))


def test_both_ways_are_asked_the_same() -> None:
    result = batching(BatchingOptions(requests=100))
    arrivals = [
        sorted(row["arrival"] for row in result[way]["first_requests"]) for way in WAYS["batching"]
    ]
    assert arrivals[0] == arrivals[1]


def test_a_prefix_cache_saves_whole_blocks_of_what_is_shared() -> None:
    given: dict[str, Any] = {
        "requests": 200,
        "lengths": "5",
        "prompt_tokens": 384,
        "shared_tokens": 330,
        "prompt_token_ms": 0.1,
        "arrivals": "closed",
    }
    cached = batching(BatchingOptions(**given))["continuous"]["requests_per_s"]
    without = batching(BatchingOptions(**given, prefix_cache=False))["continuous"]
    whole = batching(BatchingOptions(**given, block_tokens=331))["continuous"]
    assert cached > 2 * without["requests_per_s"]
    # a block longer than what is shared is never found
    assert whole["requests_per_s"] == without["requests_per_s"]


@pytest.mark.parametrize(
    ("shared", "computed"), [(384, 16), (383, 16), (368, 16), (367, 32), (16, 368), (15, 384)]
)
def test_of_a_prompt_that_is_all_shared_the_last_block_is_computed(
    shared: int, computed: int
) -> None:
    """Only one token of 384 was. An engine finds whole blocks, and never the whole prompt."""
    options = BatchingOptions(
        requests=2,
        slots=1,
        arrivals="burst",
        lengths="1",
        token_ms=1.0,
        prompt_token_ms=1.0,
        prompt_tokens=384,
        shared_tokens=shared,
    )
    for way in WAYS["batching"]:
        seconds = batching(options)[way]["makespan_s"]
        assert seconds == pytest.approx((384 + computed) / 1000)


def test_a_step_that_grows_with_the_batch_answers_fewer() -> None:
    flat, grown = (
        batching(BatchingOptions(requests=200, growth=growth))["continuous"]["makespan_s"]
        for growth in (None, 0.5)
    )
    assert grown > 2 * flat


def test_a_burst_waits_longer_than_the_same_rate_spread_out() -> None:
    given: dict[str, Any] = {"rate": 2.0, "lengths": "100"}
    even = batching(BatchingOptions(**given))["continuous"]["wait_s"]["mean"]
    burst = batching(BatchingOptions(**given, arrivals="burst", burst=64))["continuous"]["wait_s"]
    assert burst["mean"] > 10 * even


def test_a_cap_refuses_and_whoever_is_let_in_waits_less() -> None:
    free, capped = (batching(BatchingOptions(max_queued=cap))["continuous"] for cap in (None, 8))
    assert free["refused"] == 0 < capped["refused"]
    assert capped["wait_s"]["max"] < free["wait_s"]["mean"]


def test_a_run_brings_its_steps_and_its_moves(tmp_path: Path) -> None:
    run = play(tmp_path / "run")
    result = batching(BatchingOptions(from_run=(run,), requests=100))
    assert result["slots"] == 16
    assert result["step"]["base_ms"] == pytest.approx(20)
    held = paging(PagingOptions(from_run=(run,), requests=1000, limit=512, units=(16,)))
    shapes = {400 + prompt + output for prompt, output in WORK.shapes}
    assert min(shapes) * 1000 <= held["used"] <= max(shapes) * 1000


def test_each_seed_begins_elsewhere_in_what_steps_took_and_both_ways_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All seeds of the continuous batch began at one place, and the static one had no spread."""
    time = StepTime(0.02, 0.0, 0.0, spread=(1.0,) * 90 + (9.0,) * 10)
    seen = replace(simulate.calibrated((run,), None), step_time=time, shapes=((1, 5),))
    monkeypatch.setattr(simulate, "calibrated", lambda *_: seen)
    options = BatchingOptions(
        requests=8, slots=8, arrivals="burst", burst=8, seeds=50, from_run=(run,)
    )
    static, continuous = (batching(options)[way] for way in WAYS["batching"])
    assert static["band"]["makespan_s"] == continuous["band"]["makespan_s"]
    low, high = static["band"]["makespan_s"]
    assert (low, high) == pytest.approx((5 * 0.02, 5 * 9 * 0.02), rel=0.3)


def test_the_tokens_of_a_step_are_the_runs(run: Path, tmp_path: Path) -> None:
    bounded = play(tmp_path / "run", engine={"max_batched_tokens": 16})
    given: dict[str, Any] = {"requests": 64, "arrivals": "burst", "burst": 64}
    free, held = (batching(BatchingOptions(from_run=(of,), **given)) for of in (run, bounded))
    assert (free["step_tokens"], held["step_tokens"]) == (None, 16)
    for way in WAYS["batching"]:
        assert held[way]["makespan_s"] > free[way]["makespan_s"]
        assert held[way]["step_requests"] < free[way]["step_requests"] or way == "static"


# how it is told


def test_the_result_says_all_that_was_simulated(run: Path) -> None:
    result = batching(
        BatchingOptions(
            requests=1,
            slots=1,
            growth=0.05,
            prompt_token_ms=0.1,
            prompt_tokens=384,
            shared_tokens=330,
            arrivals="burst",
            max_queued=7,
            seeds=3,
        )
    )
    assert simulate_text.summary_text(result) == (
        "1 request, burst arrivals of 32 at 12/s; lengths mixed; prompts of 384 tokens, 330 of "
        "them shared; a prefix cache in blocks of 16; 1 slot; a step takes 8 ms, 5 % more for each "
        "further request in it, and 0.1 ms for each prompt token after the first; 7 may wait; "
        "seed 0 and 2 more for the bands"
    )
    assert [
        result[key]
        for key in (
            *("burst", "think_seconds", "prompt_tokens", "shared_tokens", "block_tokens"),
            *("prefix_cache", "token_ms", "growth", "prompt_token_ms", "max_queued", "runs"),
        )
    ] == [32, None, 384, 330, 16, True, 8.0, 0.05, 0.1, 7, []]
    result = batching(
        BatchingOptions(arrivals="closed", clients=1, think_seconds=3, from_run=(run,))
    )
    assert simulate_text.summary_text(result) == (
        "600 requests, from 1 client waiting for each answer, then thinking for 3 s on the "
        "average; prompts and answers as in the run; main of seen-0: 16 slots; a step takes 20.00 "
        "ms + 1000.0 µs a token + 2000.0 µs a request, and what the run's steps took beyond that; "
        "seed 0"
    )
    assert (result["runs"], result["engine"], result["think_seconds"]) == (["seen-0"], "main", 3)
    result = paging(PagingOptions(requests=1, lengths="1", memory="1MiB"))
    assert simulate_text.summary_text(result) == (
        "1 request of 1 token on the average (1; limit 4,096); a memory of 2 tokens, 524,288 B "
        "each; seed 0"
    )
    assert result["memory_bytes"] == 1 << 20


def test_a_row_tells_each_figure_under_its_heading() -> None:
    figures = {
        "wait_s": {"mean": 1.234, "p50": None, "p95": 2.345, "p99": None, "max": 3456.789},
        "makespan_s": 99.94,
        "requests_per_s": 5.678,
        "idle_share": 0.1234,
        "step_requests": 7.891,
        "refused": 12345,
        "band": {
            "wait_s": {"mean": [1.0, 2.0], "p95": [3.0, 4.0], "max": None},
            "makespan_s": [5.0, 6.0],
            "requests_per_s": [7.0, 8.0],
            "idle_share": [0.1, 0.2],
        },
    }
    (table,) = tables({"kind": "batching", "static": figures, "continuous": figures})
    figures_row, band_row = table.rows[:2]
    assert dict(zip(table.columns, figures_row, strict=True)) == {
        "batching": "static",
        "wait mean s": "1.23",
        "p95 s": "2.35",
        "max s": "3,456.79",
        "makespan s": "99.9",
        "requests/s": "5.68",
        "idle slots": "12.3%",
        "in a step": "7.89",
        "refused": "12,345",
    }
    assert band_row == (
        *("  95 % of seeds", "1.0–2.0", "3.0–4.0", "n/a", "5.0–6.0", "7.00–8.00", "0.100–0.200"),
        *("", ""),
    )


def test_a_request_of_a_static_batch_is_done_with_its_batch(told: dict[str, Any]) -> None:
    first = told["batching"]["static"]["first_requests"]
    assert all(one["started"] < one["finished"] <= one["done"] for one in first)
    assert (
        len({one["done"] for one in first[:8]}) == 1 < len({one["finished"] for one in first[:8]})
    )


def test_a_chart_goes_on_to_the_last_answer(told: dict[str, Any]) -> None:
    """The last part of each line was not drawn."""
    (busy, *_) = simulate_page.figures(told["batching"])
    for way, trace in zip(WAYS["batching"], busy["data"], strict=True):
        row = told["batching"][way]
        assert trace["y"] == [*row["timeline"]["busy_slots"], row["timeline"]["busy_slots"][-1]]
        assert (trace["x"][0], trace["x"][-1]) == (0, pytest.approx(row["makespan_s"]))


def test_the_json_has_the_keys_that_were_agreed(capsys: pytest.CaptureFixture[str]) -> None:
    assert arena("simulate", "batching", "--requests", 50, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema_version"] == 1
    for way in WAYS["batching"]:
        assert set(result[way]["wait_s"]) == {"mean", "p50", "p95", "p99", "max"}
        assert {"makespan_s", "requests_per_s", "idle_share"} <= set(result[way])
    assert arena("simulate", "paging", "--requests", 50, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema_version"] == 1
    for row in result["units"]:
        assert set(row) == {"unit", "reserved", "wasted_share", "fit"}


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """One of each kind; the fleet is held to a run."""
    seen, held = play(folder / "a"), play(folder / "b", name="held", parallel=6)
    return {
        "batching": batching(BatchingOptions(requests=60, seeds=3)),
        "paging": paging(PagingOptions(requests=50)),
        "overload": overload(OverloadOptions(seconds=2.0), EngineOptions(slots=8)),
        "fleet": fleet(
            FleetOptions(seats=40, seconds=2.0, against=(held,)), EngineOptions(from_run=(seen,))
        ),
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return results(tmp_path_factory.mktemp("told"))


KINDS = ("batching", "paging", "overload", "fleet")


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_every_figure_of_its_rows(told: dict[str, dict[str, Any]], kind: str) -> None:
    out = io.StringIO()
    print_simulation(told[kind], out)
    printed = re.sub(r"\s+", " ", out.getvalue())
    assert printed.startswith(f"simulation: {kind}: ")
    for table in tables(told[kind]):
        assert table.title in printed
        assert table.rows
        for row in table.rows:
            assert len(row) == len(table.columns)
            assert f" {' '.join(' '.join(row).split())} " in printed


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_draws_what_the_table_tells(told: dict[str, dict[str, Any]], kind: str) -> None:
    page = simulate_page.page(told[kind])
    assert page.startswith("<!doctype html>")
    (given,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    figures = simulate_page.figures(told[kind])
    assert json.loads(given) == json.loads(json.dumps(figures))
    for drawn in figures:
        assert page.count(f'id="{drawn["id"]}"') == 1
        assert all(len(trace["x"]) == len(trace["y"]) > 0 for trace in drawn["data"])
    for table in tables(told[kind]):
        for row in table.rows:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
            assert f"<tr>{cells}</tr>" in page


def test_an_assumption_is_called_one(told: dict[str, dict[str, Any]]) -> None:
    for kind, source in (("overload", "ASSUMED, not measured"), ("fleet", "fitted to")):
        out = io.StringIO()
        print_simulation(told[kind], out)
        assert source in re.sub(r"\s+", " ", out.getvalue())


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "p.html"
    assert arena("simulate", "paging", "--requests", 50, "--html", page) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"written: {page}\n")
    assert page.read_text(encoding="utf-8").endswith("</html>\n")


def test_a_sparkline() -> None:
    assert sparkline([0, 4, 8, 99], 8) == " ▄██"
    assert sparkline([0.0], 0.0) == " "


# refusals

PROMPTS = ("batching", "--prompt-tokens", 5, "--prompt-token-ms", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("batching", "--requests", 0), "--requests: 0; give 1 to"),
        (("batching", "--requests", "9" * 400), "; give 1 to 1e+06"),
        (("batching", "--requests", 1000000), "--requests: 1,000,000 are too much to simulate"),
        (("batching", "--seeds", 1000), "--requests: 600 with each of 1,000 seeds are too much"),
        (("batching", "--slots", 0), "--slots: 0; give 1 to"),
        (("batching", "--token-ms", 0), "--token-ms: 0; give"),
        (("batching", "--token-ms", "nan"), "--token-ms: nan; give"),
        (("batching", "--growth", -1), "--growth: -1; give 0 to 1"),
        (("batching", "--rate", "inf"), "--rate: inf; give"),
        (("batching", "--lengths", "long"), "--lengths: 'long' is no description of lengths"),
        (("batching", "--lengths", "0-5"), "--lengths: 0-5: give a weight over 0"),
        (("batching", "--shared-tokens", 5), "--shared-tokens: does nothing without --prompt-tok"),
        (
            (*PROMPTS, "--shared-tokens", 6),
            "--shared-tokens: 6 are more than the 5 of --prompt-tokens",
        ),
        (
            ("batching", "--prompt-tokens", 9),
            "--prompt-tokens: does nothing without --prompt-token-",
        ),
        (("batching", "--prompt-token-ms", 1), "--prompt-token-ms: does nothing without --prompt-"),
        (("batching", "--no-prefix-cache"), "--no-prefix-cache: does nothing without --shared-tok"),
        (
            (*PROMPTS, "--no-prefix-cache"),
            "--no-prefix-cache: does nothing without --shared-tokens",
        ),
        (("batching", "--block-tokens", 5), "--block-tokens: does nothing without --shared-tokens"),
        (
            (*PROMPTS, "--shared-tokens", 5, "--no-prefix-cache", "--block-tokens", 5),
            "--block-tokens: does nothing with --no-prefix-cache",
        ),
        (("batching", "--max-queued", -1), "--max-queued: -1; give 0 to"),
        (("batching", "--burst", 5), "--burst: is for --arrivals burst; leave it out"),
        (("batching", "--arrivals", "closed", "--rate", 5), "--rate: is for --arrivals poisson or"),
        (("batching", "--arrivals", "closed", "--max-queued", 0), "--think-seconds: clients who"),
        (("batching", "--engine", "x"), "--engine: names an engine of a run"),
        (("batching", "--from-run", "{run}", "--lengths", 5), "--lengths: --from-run brings"),
        (("batching", "--from-run", "{run}", "--no-prefix-cache"), "--no-prefix-cache: --from-run"),
        (("batching", "--from-run", "{run}", "--engine", "side"), "--engine side: run seen-0 has"),
        (("batching", "--from-run", "{run}/none"), "holds no run"),
        (("batching", "--from-run", "{none}"), "max_concurrent is 0"),
        (("batching", "--from-run", "{text}"), "its config does not tell the load of engine main"),
        (("batching", "--from-run", "{two}"), "engine main was several replicas, whose steps"),
        (("batching", "--from-run", "{tight}", "--slots", 65), "--slots: the run's engine cannot"),
        (("batching", "--from-run", "{lone}", "--slots", 65), "--slots: the run's engine cannot"),
        (("batching", "--seeds", 0), "--seeds: 0; give 1 to"),
        (("paging", "--limit", 2000), "--limit: 2000 tokens are fewer than the longest request's"),
        (("paging", "--units", 0), "--units: 0; give 1 to 4096"),
        (("paging", "--units", 5000), "--units: 5000; give 1 to 4096"),
        (
            ("paging", "--requests", 2000000, "--units", *range(1, 99)),
            "--units: 98 of them for 2,0",
        ),
        (("paging", "--memory", "much"), "--memory: 'much' is no size"),
        (("paging", "--memory", "1KiB"), "--memory: 1024; give 524288 to"),
        (("paging", "--kv-bytes-per-token", 0), "--kv-bytes-per-token: 0; give 1 to"),
        (("paging", "--html", "{run}"), "cannot be written (Is a directory)"),
    ],
)
def test_bad_input_is_one_line(
    run: Path,
    strange: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[object, ...],
    said: str,
) -> None:
    filled = [str(one).format(run=run, **strange) for one in arguments]
    assert arena("simulate", *filled) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("arena: ")
    assert said in line


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs whose configs say of their engine what no arena wrote, and one with small steps."""
    folder = tmp_path_factory.mktemp("strange")
    engines: dict[str, dict[str, Any]] = {
        "none": {"max_concurrent": 0},
        "text": {"max_batched_tokens": "x"},
        "tight": {"max_batched_tokens": 64},
        "lone": {"kind": "ray", "replicas": 1, "engine": {"max_batched_tokens": 64}},
    }
    runs = {name: play(folder / name, engine=engine) for name, engine in engines.items()}
    return {**runs, "two": play(folder / "two", replicas=("a", "b"))}


def test_units_above_the_limit_are_none_of_the_usual_ones() -> None:
    told = paging(PagingOptions(requests=100, limit=100, lengths="10-50"))
    assert [row["unit"] for row in told["units"]] == [100, 64, 16]
