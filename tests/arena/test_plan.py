"""`arena plan` as a person uses it: what is printed, written and refused."""

import asyncio
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arena import cli
from arena.store import Store
from serving import EngineConfigError, local_directory
from serving.models import packaged_gguf
from tests.arena.test_store import RUN, attempt_row, match_row

CONFIG = """
name = "planned"
[engines.main]
kind = "vllm"
device = "cpu"
context_tokens = 1024
max_concurrent = 16
max_queued = 32
[[agents]]
name = "a"
kind = "llm"
engine = "main"
[[agents]]
name = "b"
kind = "llm"
engine = "main"
[tournament]
games = ["chess"]
pairs = 8
parallel_matches = 12
max_plies = 40
[openings]
book = "start"
"""
GQA_8B = "--layers", "32", "--kv-heads", "8", "--head-size", "128"
MHA = "--layers", "32", "--kv-heads", "32", "--head-size", "128"
WHOLE_CARD = "--memory-fraction", "1", "--reserve", "0"

Plan = Callable[..., dict[str, Any]]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = cli.main(["plan", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    def make(*words: object) -> dict[str, Any]:
        code, out, err = run(capsys, *words, "--json")
        assert (code, err) == (0, "")
        result: dict[str, Any] = json.loads(out)
        return result

    return make


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config whose model is here; its workload is counted on the model's own template."""
    try:
        packaged_gguf()
    except EngineConfigError as error:
        pytest.skip(str(error))
    if local_directory("smollm2-135m") is None:
        pytest.skip("the packaged model is not converted yet")
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    return path


# a given shape


@pytest.mark.parametrize(
    ("tokens", "agents"), [(1000, 131), (4000, 32), (8000, 16), (32_000, 4), (128_000, 1)]
)
def test_80_gib_with_16_gib_of_weights(plan: Plan, tokens: int, agents: int) -> None:
    asked = (*MHA, "--weights-bytes", "16GiB", "--memory", "80GiB", *WHOLE_CARD)
    result = plan(*asked, "--context-tokens", tokens)
    assert result["schema_version"] == 1
    assert result["kv_bytes_per_token"] == 524_288
    assert result["weights_bytes"] == 16 << 30
    assert result["agents_fit"] == {"shared": agents, "unshared": agents}


@pytest.mark.parametrize(
    ("memory", "parameters", "layers", "least", "most"),
    [
        ("8GiB", "8.03e9", 32, 1, 3),
        ("24GiB", "8.03e9", 32, 10, 30),
        ("24GiB", "32.76e9", 64, 3, 8),
        ("48GiB", "70.6e9", 80, 5, 15),
    ],
)
def test_a_light_chat_is_comfortable(
    plan: Plan, memory: str, parameters: str, layers: int, least: int, most: int
) -> None:
    """q4 weights, 5,120 tokens of 16 bits each, the whole card less the usual 2 GiB."""
    shape = ("--layers", layers, "--kv-heads", 8, "--head-size", 128, "--parameters", parameters)
    result = plan(*shape, "--weights", "q4", "--memory", memory, "--context-tokens", 5120)
    assert least <= result["agents_fit"]["unshared"] <= most


def test_sharing_the_prefix_lets_more_in(plan: Plan) -> None:
    given = (*GQA_8B, "--parameters", "8e9", "--memory", "24GiB", "--unit-tokens", 16)
    result = plan(*given, "--context-tokens", 400, "--shared-tokens", 320)
    fit = result["agents_fit"]
    assert fit["shared"] > 4 * fit["unshared"]
    units = {row["unit_tokens"]: row for row in result["by_unit"]}
    assert units[16]["shared"] == fit["shared"]
    # a unit of 1,024 tokens holds more than a sequence, and shares nothing of it
    assert units[1024]["shared"] == units[1024]["unshared"] < fit["unshared"]
    (warned,) = plan(*given, "--shared-tokens", 10)["warnings"]
    assert "prefix caching cannot work" in warned
    assert "shared prefix of 10" in warned


def test_more_tokens_each_and_coarser_units_never_let_more_in(plan: Plan) -> None:
    result = plan(*GQA_8B, "--parameters", "8e9", "--memory", "24GiB", "--shared-tokens", 256)
    for table, key in (("by_context", "context_tokens"), ("by_unit", "unit_tokens")):
        rows = result[table]
        assert [row[key] for row in rows] == sorted(row[key] for row in rows)
        for column in ("shared", "unshared"):
            counts = [row[column] for row in rows]
            assert counts == sorted(counts, reverse=True)
        assert all(row["shared"] >= row["unshared"] for row in rows)


@pytest.mark.parametrize(("dtype", "per_token"), [("fp8", 65_536), ("q8", 69_632), ("q4", 36_864)])
def test_smaller_values_take_less(plan: Plan, dtype: str, per_token: int) -> None:
    result = plan(
        *GQA_8B, "--parameters", "8e9", "--memory", "24GiB", "--kv-dtype", dtype, "--weights", "q4"
    )
    assert result["kv_bytes_per_token"] == per_token
    assert result["weights_bytes"] == 4_500_000_000
    assert result["kv_bytes_by_dtype"][dtype] == per_token
    assert result["weights_bytes_by_dtype"]["q4"] == 4_500_000_000
    assert result["weights_bytes_by_dtype"]["fp16"] == 16_000_000_000


# compute, and what binds


H100 = (*GQA_8B, "--parameters", "8.03e9", "--device", "h100")


def test_compute_is_an_estimate_until_it_is_measured(plan: Plan, tmp_path: Path) -> None:
    work = ("--context-tokens", 400, "--uncached-tokens", 25, "--output-tokens", 4)
    estimated = plan(*H100, *work, "--agents", 256)
    assert estimated["memory"]["total_bytes"] == 80 << 30
    assert estimated["compute"]["source"] == "estimate"
    assert estimated["compute"]["requests_per_s"] == pytest.approx(956, rel=0.1)
    assert len(estimated["compute"]["assumptions"]) == 3
    assert estimated["binding"] == "compute"
    cells = [
        {"shape": "A", "streams": 16, "moves_per_s": [9999.0]},
        {"shape": "default", "streams": 1, "moves_per_s": [20.0, 21.0, 22.0]},
        {"shape": "default", "streams": 16, "moves_per_s": [80.0, 90.0, 500.0]},
    ]
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"schema_version": 1, "cells": cells}))
    measured = plan(*H100, *work, "--bench", bench)
    assert measured["compute"] == {
        "source": "measured",
        "requests_per_s": 90.0,
        "agents": 90,
        "assumptions": [],
    }


def test_the_cache_binds_where_sequences_are_long(plan: Plan) -> None:
    assert plan(*H100, "--context-tokens", 100_000, "--period", 60)["binding"] == "kv"


def test_nothing_is_said_of_speed_where_no_device_is_known(plan: Plan) -> None:
    result = plan(*GQA_8B, "--parameters", "8e9", "--memory", "24GiB")
    assert result["compute"]["requests_per_s"] is None
    assert result["compute"]["agents"] is None
    assert result["binding"] is None
    assert result["roofline"] is None


def test_the_roofline_turns_at_its_ridge(plan: Plan) -> None:
    roof = plan(*H100, "--context-tokens", 100)["roofline"]
    for row in roof["steps"]:
        assert row["bound"] == ("memory" if row["batch"] < roof["ridge_batch"] else "compute")
    rates = [row["tokens_per_s"] for row in roof["steps"]]
    assert rates == sorted(rates)


# advice


def test_goals(plan: Plan) -> None:
    alone = plan(*H100, "--goal", "latency")
    assert alone["suggest"]["max_concurrent"] == 2
    assert alone["engine_advice"]["kinds"] == ["ollama", "lmstudio"]
    assert "latency for one person" in alone["goal_advice"][0]
    fleet = plan(*H100, "--goal", "throughput", "--agents", 64, "--shared-tokens", 300)
    assert fleet["suggest"] == {"max_concurrent": 64, "context_tokens": 4096, "max_queued": 0}
    assert fleet["engine_advice"]["kinds"] == ["vllm", "sglang"]
    assert "300 shared tokens" in fleet["engine_advice"]["reason"]
    few = plan(*H100, "--agents", 6, "--period", 30)
    assert few["engine_advice"]["kinds"] == ["llama_server"]


def test_more_than_fits_waits_in_the_queue(plan: Plan) -> None:
    result = plan(*MHA, "--parameters", "7e9", "--memory", "24GiB", "--agents", 100)
    fit = result["agents_fit"]["shared"]
    assert result["suggest"]["max_concurrent"] == fit < 100
    assert result["suggest"]["max_queued"] == 100 - fit
    assert any("100 transcripts are asked for" in text for text in result["warnings"])


# configs


@pytest.mark.usefixtures("bfloat16_cpu")
def test_a_config_tells_its_engine_and_its_work(plan: Plan, config: Path) -> None:
    result = plan(config)
    assert (result["name"], result["engine"]) == ("planned", "main")
    assert result["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert result["weights_bytes"] == 2 * 134_515_008
    memory, work = result["memory"], result["workload"]
    assert (memory["unit_tokens"], memory["kv_bytes"]) == (32, 17 * 1024 * 23_040)
    assert memory["kv_tokens"] == 17 * 1024
    assert (work["streams"], work["sequences"], work["agents"]) == (12, 12, 24)
    assert 200 < work["shared_tokens"] < work["context_tokens"] <= 1024
    assert work["output_tokens"] == 5
    assert result["suggest"]["max_concurrent"] == 12
    pasted = tomllib.loads(result["toml"])["engines"]["main"]
    assert pasted == result["suggest"]


def test_the_fragment_is_a_config_that_loads(plan: Plan, config: Path) -> None:
    knobs = plan(config)["suggest"]
    changes = [f"--set=engines.main.{key}={value}" for key, value in knobs.items()]
    again = plan(config, *changes)
    assert again["suggest"] == knobs


def test_a_persona_parts_the_sides_of_a_match(plan: Plan, config: Path) -> None:
    parted = plan(config, "--set", "agents.0.persona=You are bold.")
    whole = plan(config)
    assert parted["workload"]["sequences"] == 2 * whole["workload"]["sequences"]
    assert parted["workload"]["shared_tokens"] < whole["workload"]["shared_tokens"]


def test_llama_servers_slots_share_nothing(plan: Plan, config: Path) -> None:
    config.write_text(CONFIG.replace('"vllm"', '"llama_server"').replace('device = "cpu"\n', ""))
    result = plan(config, "--set", "engines.main.context_tokens=1000")
    memory = result["memory"]
    assert (memory["unit_tokens"], memory["kv_tokens"]) == (1024, 16 * 1024)
    assert result["agents_fit"] == {"shared": 16, "unshared": 16}
    assert result["weights_bytes"] == 96_576_768
    assert any("shares no prefix" in text for text in result["warnings"])


def test_without_a_prefix_cache_every_prompt_is_computed_whole(plan: Plan, config: Path) -> None:
    result = plan(config, "--set", "engines.main.prefix_cache=false")
    assert result["workload"]["uncached_tokens"] == result["workload"]["context_tokens"]
    assert result["agents_fit"]["shared"] == result["agents_fit"]["unshared"]
    assert result["memory"]["unit_tokens"] == 32


def test_gpus_that_share_a_copy_count_as_one(plan: Plan, config: Path) -> None:
    work = ("--context-tokens", 1000, "--device", "h100", "--set", 'engines.main.device="auto"')
    one, two = (plan(config, *work, "--set", f"engines.main.tensor_parallel={n}") for n in (1, 2))
    kept = 0.9 * (80 << 30) - (2 << 30)
    assert two["memory"]["kv_bytes"] - one["memory"]["kv_bytes"] == pytest.approx(kept, abs=2)
    assert two["roofline"]["device"] == "2 of h100"
    assert two["compute"]["requests_per_s"] > one["compute"]["requests_per_s"]


def test_a_hybrid_models_blocks_are_warned_of(plan: Plan, tmp_path: Path, config: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(
        json.dumps(
            {
                "num_hidden_layers": 8,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "full_attention_interval": 4,
            }
        )
    )
    given = ("--model", model, "--context-tokens", 2048, "--shared-tokens", 300)
    result = plan(config, *given, "--set", "engines.main.kv_cache_bytes=1GiB")
    assert result["memory"]["unit_tokens"] == 528
    assert "prefix caching cannot work" in result["warnings"][0]
    assert any("blocks of 528 tokens or more" in text for text in result["warnings"])


# rent or buy


def test_rent_or_buy(plan: Plan) -> None:
    given = (*GQA_8B, "--parameters", "8e9", "--memory", "24GiB")
    usual = plan(*given)["rent_or_buy"]
    assert usual["is_illustration"]
    assert [round(row["break_even_hours"]) for row in usual["offers"]] == [1111, 526, 256]
    assert [row["months"] for row in usual["offers"]] == [None] * 3
    own = plan(
        *given, *("--price", 800, "--rent", 0.9, 0.1, "--running", 0.1, "--hours-per-week", 23)
    )["rent_or_buy"]
    assert not own["is_illustration"]
    pays, never = own["offers"]
    assert pays["break_even_hours"] == 1000
    assert pays["months"] == pytest.approx(10, rel=0.001)
    assert never == {"rent_per_hour": 0.1, "break_even_hours": None, "months": None}


async def write_run(folder: Path, *spans: tuple[float, float]) -> None:
    """A run that began just now, whose engine was asked from second to second."""
    made = Store.create(folder, RUN, [match_row()])
    for ply, (start, end) in enumerate(spans):
        made.add(attempt_row(ply)._replace(admitted=1 + start, done=1 + end))
    await made.close()


def test_the_hours_of_a_week_are_measured_in_runs(plan: Plan, tmp_path: Path) -> None:
    hour = 3600.0
    asyncio.run(write_run(tmp_path / "one", (0, 2 * hour), (hour, 3 * hour)))
    asyncio.run(write_run(tmp_path / "two", (0, hour), (71 * hour, 72 * hour)))
    given = (*GQA_8B, "--parameters", "8e9", "--memory", "24GiB", "--price", 400, "--rent", 1.05)
    cost = plan(*given, "--runs", tmp_path)["rent_or_buy"]
    # what ran at once on two records counts once
    assert cost["hours_per_week"] == pytest.approx(4, abs=0.01)
    assert cost["measured_days"] == pytest.approx(3, abs=0.01)
    assert cost["offers"][0]["break_even_hours"] == pytest.approx(400)
    assert cost["offers"][0]["months"] == pytest.approx(400 / 4 / 4.348, rel=0.01)
    assert plan(*given, "--runs", tmp_path / "one")["rent_or_buy"]["hours_per_week"] == 3


def test_records_of_less_than_a_week_are_said_to_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asyncio.run(write_run(tmp_path / "one", (0, 3600)))
    _, out, _ = run(capsys, *H100, "--runs", tmp_path / "one")
    told = re.sub(r"\s+", " ", out)
    assert "1 hours of use in the 0.042 days that the runs reach back: measure a real" in told


def test_a_run_in_which_no_engine_was_asked_has_no_hours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asyncio.run(write_run(tmp_path / "one"))
    code, _, err = run(capsys, *H100, "--runs", tmp_path)
    assert code == 2
    assert "no engine was asked in its runs" in err


# what is shown


def test_the_text_tells_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    given = (*H100, "--agents", 64, "--rent", 0.01)
    code, out, err = run(capsys, *given)
    assert (code, err) == (0, "")
    told = re.sub(r"\s+", " ", out)
    for text in (
        "given shape: what fits, for throughput",
        "KV cache a token 131,072 bytes (fp16)",
        "an estimate (45% of h100's 989 TFLOPS; 70% of its 3350 GB/s; batches of 64",
        "[engines.main] max_concurrent = 64",
        "measure a real week before deciding",
        "buying never pays",
        "1 (its own)",
    ):
        assert text in told


def test_the_page_holds_its_charts_and_no_markup_of_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = "</script><script>alert(1)</script>"
    page = tmp_path / "p.html"
    code, out, _ = run(capsys, *H100, "--model", name, "--html", page)
    assert (code, out) == (0, "")
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "alert(1)</script>" not in html
    (figures,) = re.findall(r'id="figures">(.*?)</script>', html)
    drawn = {figure["id"]: figure for figure in json.loads(figures)}
    assert drawn.keys() == {"agents", "memory", "roofline"}
    for figure in drawn:
        assert f'<div class="plot" id="{figure}">' in html
    split = sum(sum(trace["x"]) for trace in drawn["memory"]["data"])
    assert split == pytest.approx(80, abs=0.01)
    (shared, alone, *_) = drawn["agents"]["data"]
    assert len(shared["x"]) == len(shared["y"]) == len(alone["y"]) > 5


# bad input

GIVEN = ("--layers", 32, "--kv-heads", 8, "--head-size", 128, "--parameters", "8e9")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "--model: is missing"),
        (("--layers", 0, "--kv-heads", 8, "--head-size", 128), "--layers: is 0; give more than 0"),
        ((*GIVEN[:2], "--kv-heads", -8, "--head-size", 128), "--kv-heads: is -8"),
        (GIVEN[:4], "give all three, or none"),
        ((*GIVEN, "--memory=-5GiB"), "--memory: "),
        ((*GIVEN, "--memory", "much"), "--memory: 'much' is no size"),
        ((*GIVEN, "--memory", "9000000PiB"), "--memory: is "),
        (GIVEN, "--memory: is missing"),
        ((*GIVEN, "--memory", "8GiB"), "do not hold the weights"),
        ((*GIVEN, "--memory", "18GiB", "--context-tokens", 100_000), "holds no sequence of"),
        ((*GIVEN, "--memory", "24GiB", "--context-tokens", 10**13), "--context-tokens: is"),
        ((*GIVEN, "--memory", "24GiB", "--shared-tokens", 9999), "do not fit sequences"),
        ((*GIVEN, "--memory", "24GiB", "--unit-tokens", 0), "--unit-tokens: is 0"),
        ((*GIVEN, "--memory", "24GiB", "--memory-fraction", 1.5), "--memory-fraction: is 1.5"),
        ((*GIVEN, "--memory", "24GiB", "--period", "nan"), "--period: is nan"),
        ((*GIVEN, "--memory", "24GiB", "--kv-dtype", "q99"), "--kv-dtype: 'q99' is not known"),
        ((*GIVEN, "--memory", "24GiB", "--weights", "x"), "--weights: 'x' is not known"),
        ((*GIVEN, "--active-parameters", "9e9"), "more than there are parameters"),
        ((*GIVEN, "--device", "abacus"), "--device: 'abacus' is not known; use one of"),
        ((*GIVEN, "--tflops", 100), "--tflops and --bandwidth: give both"),
        ((*GIVEN, "--memory", "24GiB", "--price", -1), "price: -1 is none"),
        ((*GIVEN, "--memory", "24GiB", "--rent", 0), "rent: 0 an hour is none"),
        ((*GIVEN, "--memory", "24GiB", "--hours-per-week", 169), "at most 168"),
        ((*GIVEN, "--memory", "24GiB", "--runs", "/no/such/folder"), "holds no run"),
        ((*GIVEN, "--memory", "24GiB", "--bench", "/no/such/file"), "--bench: "),
        ((*GIVEN, "--engine", "main"), "--engine: names an engine of a config"),
        ((*GIVEN, "--set", "name=x"), "--set: changes a config"),
        (("--model", "owner/none", "--memory", "24GiB"), "is not on this machine"),
        (("no-such.toml",), "no-such.toml: cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], words: tuple[object, ...], told: str
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert told in err
    assert err.startswith("arena: ")
    assert err.count("\n") == 1


def test_a_bench_of_other_shapes_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for content in ("{", "[]", '{"cells": [{"shape": "A", "moves_per_s": [1]}]}'):
        (tmp_path / "b.json").write_text(content)
        code, _, err = run(capsys, *H100, "--bench", tmp_path / "b.json")
        assert code == 2
        assert 'has no cell of the shape "default"' in err


def test_a_kind_of_engine_without_a_local_cache_needs_the_memory(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    code, _, err = run(capsys, config, "--engine", "other")
    assert code == 2
    assert "--engine other: no engine is named so; engines: main" in err


def test_a_page_is_refused_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.html").write_text("notes of mine")
    code, _, err = run(capsys, *H100, "--html", tmp_path / "p.html")
    assert code == 2
    assert "is no HTML page" in err
    assert (tmp_path / "p.html").read_text() == "notes of mine"
