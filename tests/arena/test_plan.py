"""`arena plan` as a person uses it: what is printed, written and refused."""

import asyncio
import json
import re
import sqlite3
import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from arena import cli
from arena.store import Store
from serving import EngineConfigError, local_directory
from serving.models import packaged_gguf
from tests.arena.test_store import RUN, attempt_row, match_row

ROOT = Path(__file__).parents[2]
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
            counts = [row[column] for row in rows if row[column] is not None]
            assert len(counts) > 5
            assert counts == sorted(counts, reverse=True)
        assert all(row["shared"] is None or row["shared"] >= row["unshared"] for row in rows)


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
    bench = write_bench(tmp_path, "given shape")
    measured = plan(*H100, *work, "--bench", bench)
    assert measured["compute"] == {
        "source": "measured",
        "requests_per_s": 90.0,
        "agents": 90,
        "assumptions": ["main (vllm), 16 at once"],
    }


def write_bench(folder: Path, model: str | None, **changed: object) -> Path:
    """What `arena bench shape --json` prints."""
    cells = [
        {"shape": "A", "streams": 16, "submission": "continuous", "moves_per_s": [9999.0]},
        {
            "shape": "default",
            "streams": 1,
            "submission": "continuous",
            "moves_per_s": [21.0, 20, 22],
        },
        {"shape": "default", "streams": 16, "submission": "waves", "moves_per_s": [9999.0]},
        {
            "shape": "default",
            "streams": 16,
            "submission": "continuous",
            "moves_per_s": [80.0, 90.0, 500.0],
        },
    ]
    cells = [{**cell, **changed} for cell in cells]
    path = folder / "bench.json"
    engine = {"name": "main", "kind": "vllm", "model": model}
    path.write_text(json.dumps({"schema_version": 1, "engine": engine, "cells": cells}))
    return path


def test_what_was_measured_of_another_model_is_refused(
    plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench = write_bench(tmp_path, "other")
    code, _, err = run(capsys, *H100, "--bench", bench)
    assert code == 2
    assert "measured the model 'other', and this plan is of 'given shape'" in err
    assert plan(*H100, "--model", "other", "--bench", bench)["compute"]["source"] == "measured"


def test_of_fewer_at_once_than_were_measured_their_share_counts(plan: Plan, tmp_path: Path) -> None:
    bench = write_bench(tmp_path, "given shape")
    narrow = plan(*H100, "--context-tokens", 50_000, "--bench", bench)
    assert narrow["agents_fit"]["shared"] == 10
    assert narrow["compute"]["requests_per_s"] == 90 * 10 / 16


def test_what_binds_does_not_depend_on_how_many_ask_now(plan: Plan) -> None:
    card = (*GQA_8B, "--parameters", "8e9", "--weights", "q4", "--device", "rtx4090")
    assert plan(*card)["binding"] == plan(*card, "--agents", 1)["binding"] == "kv"


def test_agents_without_a_pace_are_not_counted_in_time(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*GQA_8B, "--parameters", "8e9", "--device", "rtx4090", "--period", 0)
    result = plan(*words)
    assert result["compute"]["requests_per_s"] > 10
    assert (result["compute"]["agents"], result["binding"]) == (None, "kv")
    _, out, _ = run(capsys, *words)
    assert "agents have no pace" in out
    assert "is not given" not in out


def test_a_window_ends_what_a_step_reads(plan: Plan, tmp_path: Path) -> None:
    whole = {
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    sliding = {**whole, "layer_types": ["sliding_attention"] * 8, "sliding_window": 128}
    steps = []
    for number, settings in enumerate((whole, sliding)):
        (tmp_path / f"{number}.json").write_text(json.dumps(settings))
        given = ("--model", tmp_path / f"{number}.json", "--parameters", "1e9", "--device", "h100")
        roof = plan(*given, "--context-tokens", 32_768)["roofline"]
        steps.append(next(row["step_ms"] for row in roof["steps"] if row["batch"] == 64))
    assert steps[0] > 10 * steps[1]


def test_of_experts_a_step_of_few_reads_few(plan: Plan) -> None:
    dense = plan(*H100)["roofline"]["steps"]
    experts = plan(*H100, "--active-parameters", "1e9")["roofline"]["steps"]
    assert experts[0]["step_ms"] < dense[0]["step_ms"] / 5
    assert experts[-1]["step_ms"] == pytest.approx(dense[-1]["step_ms"], rel=0.6)


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


def test_the_queue_for_latency_is_what_two_at_once_answer_in_time(plan: Plan) -> None:
    result = plan(*H100, "--goal", "latency")
    at_two = next(row for row in result["roofline"]["steps"] if row["batch"] == 2)
    assert at_two["tokens_per_s"] / 5 > 20  # what 5 tokens of an answer allow
    waiting = 0.6 * at_two["tokens_per_s"] / 5 - 2
    assert result["suggest"]["max_queued"] == pytest.approx(waiting, abs=2)


def test_latency_for_a_fleet_says_that_it_waits(plan: Plan) -> None:
    result = plan(*H100, "--goal", "latency", "--agents", 100)
    assert result["suggest"]["max_queued"] == 98
    assert "100 may ask at once, and 98 of them wait" in result["goal_advice"][1]


@pytest.mark.parametrize("device", [(), ("--device", "h100")])
def test_who_asks_once_a_minute_is_at_leisure(plan: Plan, device: tuple[str, ...]) -> None:
    given = (*GQA_8B, "--parameters", "8e9", "--memory", "24GiB", *device, "--period", 60)
    few, more = (plan(*given, "--agents", agents)["engine_advice"] for agents in (6, 20))
    assert few["kinds"] == more["kinds"] == ["llama_server"]
    assert "a slot each" in few["reason"]
    assert "take turns at the 14 slots" in more["reason"]


def test_long_answers_fill_an_engine_at_any_pace(plan: Plan) -> None:
    given = (*GQA_8B, "--parameters", "8e9", "--memory", "24GiB", "--agents", 20, "--period", 20)
    slow = ("--tflops", 50, "--bandwidth", 300, "--output-tokens", 2000)
    assert plan(*given, *slow)["engine_advice"]["kinds"] == ["vllm", "sglang"]


def test_advice_counts_at_once_what_is_suggested(plan: Plan) -> None:
    given = (*GQA_8B, "--parameters", "8e9", "--memory", "24GiB", "--unit-tokens", 16)
    result = plan(*given, "--context-tokens", 100, "--shared-tokens", 16)
    concurrent = result["suggest"]["max_concurrent"]
    assert f"up to {concurrent:,} at once" in result["engine_advice"]["reason"]


def test_one_agent_fills_no_batch(plan: Plan) -> None:
    (told,) = plan(*H100, "--agents", 1)["goal_advice"]
    assert "no batch to fill" in told
    assert "full batches" not in told


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
    # both sides of a match share a transcript, of which whole ones fit
    longest = work["context_tokens"] - work["shared_tokens"]
    assert memory["kv_tokens"] / longest * 2 > result["agents_fit"]["shared"] > 2 * 17
    assert result["agents_fit"]["shared"] % 2 == 0
    assert tomllib.loads(result["toml"])["engines"]["main"] == result["suggest"]


def pasted(text: str, fragment: str) -> str:
    """A config with the lines of a fragment in place of its own of these names."""
    table = tomllib.loads(fragment)["engines"]["main"]
    kept = [line for line in text.splitlines() if line.partition(" = ")[0] not in table]
    kept[kept.index("[engines.main]")] = fragment
    return "\n".join(kept)


def test_the_fragment_takes_the_place_of_lines_and_keeps_the_cache(
    plan: Plan, config: Path
) -> None:
    before = plan(config)
    assert before["toml"].startswith("# in place of the lines of these names\n[engines.main]\n")
    config.write_text(pasted(CONFIG, before["toml"]))
    after = plan(config)
    assert after["memory"]["kv_bytes"] == before["memory"]["kv_bytes"]
    assert after["agents_fit"] == before["agents_fit"]
    assert after["suggest"].items() <= before["suggest"].items()


def test_what_a_game_takes_is_counted_on_the_model_that_is_named(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA_8B))
    code, out, err = run(capsys, config, "--model", model)
    assert (code, out) == (2, "")
    assert "is not on this machine, so what is asked of it cannot be counted: give" in err


def test_a_plan_downloads_nothing(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(model: str) -> None:
        raise AssertionError(f"{model} is fetched")

    monkeypatch.setattr("serving.models._hub_snapshot", fetched)
    monkeypatch.setattr("serving.models._convert", fetched)
    config.write_text(CONFIG.replace("[engines.main]", '[engines.main]\nmodel = "owner/none"'))
    code, _, err = run(capsys, config, *GQA_8B, "--parameters", "8e9")
    assert code == 2
    assert "the tokenizer of 'owner/none' is not on this machine" in err


def test_the_guides_plan_of_a_fleet_works_as_printed(plan: Plan) -> None:
    guide = (ROOT / "docs/guides/capacity.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"arena plan (configs/fleet-gpu.toml(?:.*\\\n)+.*)\n", guide)
    config, *rest = words.replace("\\\n", " ").split()
    result = plan(ROOT / config, *rest)
    assert result["kv_bytes_per_token"] == 57_344
    assert result["agents_fit"]["shared"] > 64


def test_an_engine_that_none_asks_is_planned_as_if_all_did(plan: Plan, config: Path) -> None:
    more = CONFIG.replace("[[agents]]", '[engines.spare]\nkind = "vllm"\n[[agents]]', 1)
    config.write_text(more)
    spare = plan(config, "--engine", "spare")
    assert spare["engine"] == "spare"
    assert spare["workload"]["agents"] == plan(config, "--engine", "main")["workload"]["agents"]


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
}
AWQ = {"quant_method": "awq", "bits": 4}
WORK = ("--context-tokens", 4096, "--shared-tokens", 300)


def write_model(folder: Path, **changed: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA_8B, **changed}))
    return path


@pytest.mark.parametrize(
    ("quantised", "given", "gib"),
    [
        ({}, (), 14.96),
        (AWQ, (), 5.6),
        (AWQ, ("--parameters", "8.03e9"), 5.6),
        (AWQ, ("--set", 'engines.main.dtype="half"'), 5.6),
        ({"quant_method": "fp8"}, ("--parameters", "8.03e9"), 8.5),
        (AWQ, ("--weights", "fp16"), 14.96),
        ({}, ("--set", 'engines.main.dtype="float32"'), 29.92),
    ],
)
def test_quantised_weights_stay_so(
    plan: Plan, config: Path, tmp_path: Path, quantised: object, given: tuple[str, ...], gib: float
) -> None:
    model = write_model(tmp_path, **{"quantization_config": quantised} if quantised else {})
    result = plan(config, "--model", model, *WORK, "--device", "h100", *given)
    assert result["weights_bytes"] / 2**30 == pytest.approx(gib, rel=0.02)


def test_a_cpu_without_bfloat16_keeps_weights_in_32_bits(
    plan: Plan, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.config.CPU_INFO", Path("/no/such/file"))
    result = plan(config)
    assert result["kv_dtype"] == "fp32"
    assert result["weights_bytes"] == 4 * 134_515_008


def test_a_note_that_is_answered_is_gone(plan: Plan, tmp_path: Path) -> None:
    model = write_model(tmp_path)
    (note,) = plan("--model", model, "--memory", "24GiB")["notes"]
    assert "as of a dense model" in note
    assert plan("--model", model, "--memory", "24GiB", "--parameters", "8e9")["notes"] == []


def test_values_of_the_models_own_type_are_called_so(plan: Plan, tmp_path: Path) -> None:
    assert plan("--model", write_model(tmp_path), "--memory", "24GiB")["kv_dtype"] == "bf16"


def test_a_device_that_is_named_is_the_one_planned_for(plan: Plan, config: Path) -> None:
    result = plan(config, "--device", "h100", *WORK)
    assert result["memory"]["unit_tokens"] == 16
    assert result["memory"]["kv_bytes"] > 60 << 30


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
    # a match, that is two agents, a slot
    assert result["agents_fit"] == {"shared": 32, "unshared": 32}
    assert result["weights_bytes"] == 96_576_768
    assert any("shares no prefix" in text for text in result["warnings"])
    assert "with these knobs the cache holds 9,216 tokens" in result["goal_advice"][-1]


def test_without_a_prefix_cache_every_prompt_is_computed_whole(plan: Plan, config: Path) -> None:
    result = plan(config, "--set", "engines.main.prefix_cache=false")
    assert result["workload"]["uncached_tokens"] == result["workload"]["context_tokens"]
    assert result["agents_fit"]["shared"] == result["agents_fit"]["unshared"]
    assert result["memory"]["unit_tokens"] == 32


def test_gpus_that_share_a_copy_count_as_one(plan: Plan, config: Path) -> None:
    work = ("--context-tokens", 1000, "--device", "h100")
    one, three = (plan(config, *work, "--set", f"engines.main.tensor_parallel={n}") for n in (1, 3))
    kept = 2 * (0.9 * (80 << 30) - (2 << 30))
    assert three["memory"]["kv_bytes"] - one["memory"]["kv_bytes"] == pytest.approx(kept, abs=3)
    assert three["roofline"]["device"] == "3 of h100"
    assert three["compute"]["requests_per_s"] > one["compute"]["requests_per_s"]


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
    assert "choose a smaller block_tokens" not in result["warnings"][0]
    assert any("blocks of 528 tokens or more" in text for text in result["warnings"])
    # without an engine nothing makes such blocks, and the warning tells how to plan for them
    free = plan(*given, "--memory", "24GiB", "--parameters", "1e9")
    assert free["memory"]["unit_tokens"] == 1
    (warned,) = free["warnings"]
    assert "--unit-tokens 528 plans them" in warned


def test_a_block_as_long_as_the_prefix_is_reused(plan: Plan) -> None:
    given = (*GQA_8B, "--parameters", "8e9", "--memory", "24GiB", "--unit-tokens", 16)
    result = plan(*given, "--shared-tokens", 16, "--context-tokens", 100)
    assert not any("prefix caching" in text for text in result["warnings"])
    assert result["agents_fit"]["shared"] > result["agents_fit"]["unshared"]
    longer = plan(*given, "--shared-tokens", 15, "--context-tokens", 100)
    assert any("prefix caching cannot work" in text for text in longer["warnings"])


def test_no_agents_are_told_of_sequences_within_what_is_shared(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (*GQA_8B, "--parameters", "8e9", "--memory", "24GiB", "--shared-tokens", 1024)
    rows = {row["context_tokens"]: row for row in plan(*given)["by_context"]}
    assert [rows[tokens]["shared"] for tokens in (512, 1024)] == [None, None]
    assert rows[1024]["unshared"] > rows[2048]["unshared"] > 0
    assert rows[2048]["shared"] > 0
    _, out, _ = run(capsys, *given)
    assert re.search(r"^ *512 +n/a +\d", out, re.MULTILINE)


# rent or buy


def test_rent_or_buy(plan: Plan) -> None:
    given = (*GQA_8B, "--parameters", "8e9", "--memory", "24GiB")
    usual = plan(*given)["rent_or_buy"]
    assert usual["illustrations"] == ["the price", "the rents", "the cost to run"]
    assert plan(*given, "--running", 0.3)["rent_or_buy"]["illustrations"] == [
        "the price",
        "the rents",
    ]
    assert [round(row["break_even_hours"]) for row in usual["offers"]] == [1111, 526, 256]
    assert [row["months"] for row in usual["offers"]] == [None] * 3
    own = plan(
        *given, *("--price", 800, "--rent", 0.9, 0.1, "--running", 0.1, "--hours-per-week", 23)
    )["rent_or_buy"]
    assert own["illustrations"] == []
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
    assert not cost["is_whole_week"]
    assert cost["offers"][0]["months"] is None
    assert plan(*given, "--runs", tmp_path / "one")["rent_or_buy"]["hours_per_week"] == 3


def test_a_whole_week_tells_months(plan: Plan, tmp_path: Path) -> None:
    hour = 3600.0
    asyncio.run(write_run(tmp_path / "one", (0, hour), (168 * hour, 171 * hour)))
    given = (*GQA_8B, "--parameters", "8e9", "--memory", "24GiB", "--price", 300, "--rent", 1.05)
    cost = plan(*given, "--runs", tmp_path)["rent_or_buy"]
    assert cost["is_whole_week"]
    hours = cost["hours_per_week"]
    assert hours == pytest.approx(3, abs=0.01)
    assert cost["offers"][0]["months"] == pytest.approx(300 / hours / 4.348, rel=0.001)


@pytest.mark.parametrize(
    "sql",
    [
        *(
            f"UPDATE events SET detail_json = '{detail}' WHERE kind = 'process_start'"
            for detail in ("{", "{}", "[]", '{"wall": 5, "offset_s": 0}', '{"wall": "now"}')
        ),
        "UPDATE attempts SET done = -1",
        "UPDATE attempts SET done = 1e300",
        "DROP TABLE attempts",
    ],
)
def test_a_run_that_cannot_be_read_is_left_out_and_named(
    plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path, sql: str
) -> None:
    asyncio.run(write_run(tmp_path / "good", (0, 3600)))
    asyncio.run(write_run(tmp_path / "bad", (0, 3600)))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.db").touch()
    with closing(sqlite3.connect(tmp_path / "bad" / "run.db")) as db:
        db.execute(sql)
        db.commit()
    cost = plan(*H100, "--runs", tmp_path)["rent_or_buy"]
    assert cost["hours_per_week"] == 1
    bad, empty = cost["runs_left_out"]
    assert str(tmp_path / "bad") in bad
    assert str(tmp_path / "empty") in empty
    _, out, _ = run(capsys, *H100, "--runs", tmp_path)
    assert "not counted: " in out
    code, out, err = run(capsys, *H100, "--runs", tmp_path / "bad")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_records_of_less_than_a_week_are_said_to_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asyncio.run(write_run(tmp_path / "one", (0, 3600)))
    _, out, _ = run(capsys, *H100, "--runs", tmp_path / "one")
    told = re.sub(r"\s+", " ", out)
    assert "1 hours of use in the 0.042 days that the runs reach back, too few to tell" in told


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
        "an estimate (45% of h100's 989 TFLOPS; 70% of its 3350 GB/s; batches of",
        "assumed, as of a chess move: give --uncached-tokens, --output-tokens, --period",
        "[engines.main] max_concurrent = 64",
        "measure a real week before deciding",
        "never: there an hour of one's own costs as much",
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
    assert '<table class="facts">' in html
    assert ".facts td:nth-child(2) { white-space: normal;" in html
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
        (("--layers", 0, "--kv-heads", 8, "--head-size", 128), "--layers: is 0; give 1 to"),
        ((*GIVEN[:2], "--kv-heads", -8, "--head-size", 128), "--kv-heads: is -8"),
        (GIVEN[:4], "give all three, or none"),
        ((*GIVEN, "--memory=-5GiB"), "--memory: "),
        ((*GIVEN, "--memory", "much"), "--memory: 'much' is no size"),
        ((*GIVEN, "--memory", "9000000PiB"), "--memory: is "),
        (GIVEN, "--memory: is missing"),
        ((*GIVEN, "--memory", "8GiB"), "do not hold the weights"),
        ((*GIVEN, "--memory", "18GiB", "--context-tokens", 100_000), "holds no sequence of"),
        ((*GIVEN, "--memory", "24GiB", "--context-tokens", 10**13), "--context-tokens: is"),
        ((*GIVEN, "--memory", "24GiB", "--shared-tokens", 9999), "leave nothing of its own"),
        ((*GIVEN, "--memory", "24GiB", "--shared-tokens", 4096), "leave nothing of its own"),
        ((*GIVEN, "--memory", "24GiB", "--unit-tokens", 0), "--unit-tokens: is 0"),
        (
            (*GIVEN, "--memory", "24GiB", "--unit-tokens", 1 << 41),
            "--unit-tokens: is 2199023255552; give 1 to",
        ),
        ((*GIVEN, "--memory", "24GiB", "--memory-fraction", 1.5), "--memory-fraction: is 1.5"),
        ((*GIVEN, "--memory", "24GiB", "--period", "nan"), "--period: is nan"),
        ((*GIVEN, "--memory", "24GiB", "--kv-dtype", "q99"), "--kv-dtype: 'q99' is not known"),
        ((*GIVEN, "--memory", "24GiB", "--weights", "x"), "--weights: 'x' is not known"),
        ((*GIVEN, "--active-parameters", "9e9"), "more than there are parameters"),
        ((*GIVEN, "--device", "abacus"), "--device: 'abacus' is not known; use one of"),
        ((*GIVEN, "--tflops", 100), "--tflops and --bandwidth: give both"),
        ((*GIVEN, "--memory", "24GiB", "--price", -1), "--price: is -1.0; give 0 to"),
        ((*GIVEN, "--memory", "24GiB", "--price", "1e308"), "--price: is 1e+308; give 0 to"),
        ((*GIVEN, "--memory", "24GiB", "--rent", 0), "--rent: is 0.0; give 0.0001 to"),
        ((*GIVEN, "--memory", "24GiB", "--hours-per-week", 169), "give 0.01 to 168"),
        ((*GIVEN, "--memory", "24GiB", "--hours-per-week", "1e-308"), "give 0.01 to 168"),
        ((*GIVEN, "--tflops", "1e-308", "--bandwidth", 1), "--tflops: is 1e-308; give 0.001"),
        ((*GIVEN, "--memory", "24GiB", "--period", "1e-308"), "--period: is 1e-308; give 0.001"),
        ((*GIVEN[:-1], "0.4", "--device", "h100"), "--parameters: is 0.4; give 1 to"),
        ((*GIVEN, "--active-parameters", "0.3", "--device", "h100"), "is 0.3; give 1 to"),
        ((*GIVEN, "--memory", "24GiB/2"), "--memory: '24GiB/2' is no size"),
        ((*GIVEN, "--memory", "24GiB-20GiB"), "--memory: '24GiB-20GiB' is no size"),
        ((*GIVEN, "--memory", "24 GiB junk"), "--memory: '24 GiB junk' is no size"),
        ((*GIVEN, "--memory", "1e-308"), "--memory: '1e-308' is no size"),
        ((*GIVEN, "--memory", "9" * 4000), "is no size"),
        (("--model", "m" * 5000, "--memory", "24GiB"), "File name too long"),
        ((*GIVEN, "--memory", "24GiB", "--runs", "r" * 5000), "--runs: "),
        ((*GIVEN, "--memory", "24GiB", "--bench", "b" * 5000), "--bench: "),
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


def test_a_size_may_be_a_number(plan: Plan) -> None:
    assert plan(*GIVEN, "--memory", "25.5e9")["memory"]["total_bytes"] == 25_500_000_000
    assert plan(*GIVEN, "--memory", " 24 gib ")["memory"]["total_bytes"] == 24 << 30


def test_a_result_without_end_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arena.plan.rent_or_buy", lambda ask: {"offers": [{"months": 1e308 * 10}]})
    code, out, err = run(capsys, *GIVEN, "--memory", "24GiB", "--json")
    assert (code, out) == (2, "")
    assert "months: is beyond all measure" in err


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"cells": [{"shape": "A", "moves_per_s": [1]}]}', "[" * 100_000]
)
def test_a_bench_of_other_shapes_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    (tmp_path / "b.json").write_text(content)
    code, _, err = run(capsys, *H100, "--bench", tmp_path / "b.json")
    assert code == 2
    assert 'has no cell of the shape "default"' in err


@pytest.mark.parametrize(
    "changed",
    [
        {"moves_per_s": "345"},
        {"moves_per_s": []},
        {"moves_per_s": [0]},
        {"moves_per_s": ["9"]},
        {"streams": 0},
        {"streams": "16"},
    ],
)
def test_a_bench_of_other_values_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changed: dict[str, object]
) -> None:
    bench = write_bench(tmp_path, "given shape", **changed)
    code, _, err = run(capsys, *H100, "--bench", bench)
    assert code == 2
    assert 'has no cell of the shape "default"' in err


def test_an_engine_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    code, _, err = run(capsys, config, "--engine", "other")
    assert code == 2
    assert "--engine other: no engine is named so; engines: main" in err


def test_a_kind_of_engine_without_a_local_cache_needs_the_memory(
    plan: Plan, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    config.write_text(CONFIG.replace('"vllm"\ndevice = "cpu"', '"ollama"\nmodel = "smol"'))
    words = (config, *GQA_8B, "--parameters", "8e9", *WORK)
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "--memory: is missing, and nothing else says how large the KV cache is" in err
    assert plan(*words, "--memory", "24GiB")["agents_fit"]["unshared"] > 10


def test_a_page_is_refused_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.html").write_text("notes of mine")
    code, _, err = run(capsys, *H100, "--html", tmp_path / "p.html")
    assert code == 2
    assert "is no page of ours" in err
    assert (tmp_path / "p.html").read_text() == "notes of mine"
