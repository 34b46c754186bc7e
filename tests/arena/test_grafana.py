"""The Grafana dashboard: what it asks for exists, and Grafana can show it.

vLLM's own names are checked in tests/live/test_metrics_live.py, and that runs bring all of ours
there and, of replicas, in tests/live/test_ray_vllm_live.py.
"""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from arena.metrics import DEFINITIONS
from tests.arena.test_metrics import scrape_by_hand

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "configs/grafana/boardfleet.json").read_text()
)
PANELS: list[dict[str, Any]] = BOARD["panels"]
CHARTS = [panel for panel in PANELS if panel["type"] != "row"]
QUERIES: list[tuple[str, str]] = [
    (target["expr"], target["legendFormat"]) for panel in CHARTS for target in panel["targets"]
]
VARIABLES: dict[str, dict[str, Any]] = {
    variable["name"]: variable for variable in BOARD["templating"]["list"]
}
PROMETHEUS = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
SCHEMA_OF_11 = range(39, 42)

FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile"}
_CLAUSE = re.compile(r"\bby \(([^)]*)\)|\{([^}]*)\}|\[[^\]]*\]")
_WORD = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_NAME = re.compile(r"(?:arena_|vllm:)[a-z0-9_:]+")
_MATCHER = re.compile(r'([a-z_]+)=~"\$([a-z]+)"')


def names_in(expr: str) -> set[str]:
    """Names of metrics, as samples bear them, that an expression asks for."""
    words = set(_WORD.findall(_CLAUSE.sub(" ", expr))) - FUNCTIONS
    assert words, expr
    assert all(_NAME.fullmatch(word) for word in words), words
    return words


def queried_names() -> set[str]:
    """Everything that the panels and variables of the dashboard ask for."""
    asked = {name for expr, _ in QUERIES for name in names_in(expr)}
    for variable in VARIABLES.values():
        if variable["type"] == "query":
            asked |= set(_NAME.findall(variable["query"]["query"]))
    return asked


def names_of_replicas(names: set[str]) -> set[str]:
    """Those that only a run on several replicas has."""
    return {name for name in names if name.startswith(("arena_replica_", "arena_matches_moved_"))}


def names_of(text: str) -> set[str]:
    """Names of the samples of a scrape."""
    families = text_string_to_metric_families(text)
    return {sample.name for family in families for sample in family.samples}


async def test_every_metric_of_ours_that_is_queried_is_scraped() -> None:
    ours = {name for name in queried_names() if name.startswith("arena_")}
    assert len(ours) > 40
    assert ours - names_of(await scrape_by_hand()) == set()


def test_every_metric_of_ours_is_shown_but_those_about_names() -> None:
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in queried_names()}
    assert {d.name for d in DEFINITIONS} - shown == {"arena_info", "arena_engine_info"}


@pytest.mark.parametrize(("expr", "legend"), QUERIES)
def test_a_query_groups_and_selects_by_labels_that_its_metrics_have(expr: str, legend: str) -> None:
    labels = {d.name: {*d.labels, "le"} for d in DEFINITIONS}
    known = [
        labels[re.sub("_(bucket|sum|count)$", "", name)]
        for name in names_in(expr)
        if name.startswith("arena_")
    ]
    clauses = _CLAUSE.findall(expr)
    groups = {label.strip() for by, _ in clauses for label in by.split(",") if label.strip()}
    chosen = [_MATCHER.findall(matchers) for _, matchers in clauses if matchers]
    assert all(chosen), expr
    assert all(label == variable for pairs in chosen for label, variable in pairs)
    told = set(re.findall(r"\{\{(\w+)\}\}", legend))
    if known:
        assert groups | {label for pairs in chosen for label, _ in pairs} <= set.union(*known)
        assert told <= (groups or set.union(*known))
    assert legend
    assert expr.count("(") == expr.count(")")


@pytest.mark.parametrize("expr", [expr for expr, _ in QUERIES])
def test_what_only_grows_is_asked_for_its_growth_in_the_window(expr: str) -> None:
    for name in names_in(expr):
        if name.endswith(("_total", "_bucket", "_sum", "_count")):
            window = re.search(
                rf"\b(rate|increase)\({name}(\{{[^}}]*\}})?\[\$__rate_interval\]", expr
            )
            assert window or is_a_total(expr), expr


def is_a_total(expr: str) -> bool:
    """Shown as a number so far: rare events, whose rate says little."""
    rare = ("arena_matches_finished_total", "arena_flag_falls_total", "arena_engine_restarts_total")
    return names_in(expr) <= set(rare)


def test_it_is_of_grafana_11_and_bound_to_no_installation() -> None:
    assert BOARD["schemaVersion"] in SCHEMA_OF_11
    assert BOARD.keys().isdisjoint({"id", "uid"})
    assert {"grafana", "prometheus"} <= {needed["id"] for needed in BOARD["__requires"]}
    types = {needed["id"] for needed in BOARD["__requires"] if needed["type"] == "panel"}
    assert types == {panel["type"] for panel in CHARTS}
    assert set(uids(BOARD)) == {"${DS_PROMETHEUS}", "-- Grafana --"}


def uids(value: Any) -> Iterator[str]:
    """Every uid, however deep."""
    if isinstance(value, dict):
        if "uid" in value:
            yield value["uid"]
        for inner in value.values():
            yield from uids(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from uids(inner)


def test_its_variables_are_those_that_queries_use() -> None:
    used = {name for expr, _ in QUERIES for name in re.findall(r"\$([a-z]+)\b", expr)}
    assert used == {"engine", "game"}
    assert VARIABLES.keys() == {"DS_PROMETHEUS", *used}
    assert VARIABLES["DS_PROMETHEUS"]["type"] == "datasource"
    for name in used:
        assert VARIABLES[name]["datasource"] == PROMETHEUS
        assert VARIABLES[name]["allValue"] == ".*", "agents without an engine are part of all"


def test_rows_are_in_the_order_of_the_questions() -> None:
    assert [panel["title"] for panel in PANELS if panel["type"] == "row"] == [
        "Fleet",
        "Latency",
        "Where time goes",
        "Batch",
        "Queue and saturation",
        "KV and prefix cache",
        "Replicas",
        "Faults",
        "vLLM's own",
    ]


@pytest.mark.parametrize("panel", CHARTS, ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    is_heatmap = panel["type"] == "heatmap"
    unit = panel["options"]["yAxis"] if is_heatmap else panel["fieldConfig"]["defaults"]
    assert unit["unit"]
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["datasource"] == PROMETHEUS
    assert {target["refId"] for target in panel["targets"]} == set(
        "ABCDEFGH"[: len(panel["targets"])]
    )
    for target in panel["targets"]:
        assert target["datasource"] == PROMETHEUS
        assert (target.get("format") == "heatmap") == is_heatmap


def test_seconds_and_ratios_have_their_units() -> None:
    for panel in CHARTS:
        unit = panel["fieldConfig"]["defaults"].get("unit")
        exprs = [target["expr"] for target in panel["targets"]]
        if all("_seconds_bucket" in expr or "_seconds_sum" in expr for expr in exprs):
            assert unit == "s" or panel["type"] == "heatmap", panel["title"]
        if any("_ratio" in expr or "_perc" in expr for expr in exprs):
            assert unit == "percentunit", panel["title"]


def test_panels_have_ids_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in PANELS]
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        assert place["h"] > 0
    for one, two in combinations(places, 2):
        assert (
            one["x"] + one["w"] <= two["x"]
            or two["x"] + two["w"] <= one["x"]
            or one["y"] + one["h"] <= two["y"]
            or two["y"] + two["h"] <= one["y"]
        ), (one, two)
    rows = sorted({place["y"] for place in places})
    for y in rows:  # no holes to the right
        assert sum(p["w"] for p in places if p["y"] <= y < p["y"] + p["h"]) == 24, y


# The reading of queries itself.


def test_names_are_told_from_labels_functions_and_windows() -> None:
    expr = (
        'sum by (game, arena_engine) (rate(arena_moves_total{game=~"$game"}[$__rate_interval]))'
        " / sum(vllm:num_requests_running) > 0"
    )
    assert names_in(expr) == {"arena_moves_total", "vllm:num_requests_running"}
    with pytest.raises(AssertionError, match="node_load1"):
        names_in("sum(node_load1)")
