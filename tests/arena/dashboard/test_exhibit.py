"""Frames of a run: whoever comes when, and on whichever page, ends up seeing the same."""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arena.dashboard import exhibit as module
from arena.dashboard.browse import Wish
from arena.dashboard.exhibit import LiveExhibit, drawings
from arena.figures import Figures
from arena.frames import TELEMETRY_S, Overview
from arena.store import EventRow, MatchRow, PlyRow, Row, Store
from tests.arena.random_runs import RUN, bucket, commits, random_run, scheduled, tapped

CHESS = ("chess", "standard")


class Clock:
    """What the exhibit takes for `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


async def no_metrics() -> str:
    return "arena_plies_total 0\n"


class Show:
    """An exhibit of figures, looked at as a watch does, on a clock of its own."""

    def __init__(self, matches: Sequence[MatchRow], clock: Clock, folder: Path) -> None:
        self.clock = clock
        self.figures = Figures(RUN, matches, exact=False)
        self.overview = Overview(self.figures)
        self.exhibit = LiveExhibit(self.overview, folder, no_metrics)

    def look(self, *rows: Row, after: float = 1.0, whole: bool = False) -> None:
        """Rows come, and time passes until the look."""
        self.clock.now += after
        self.figures.add(rows)
        now = self.figures.last_record
        self.exhibit.look(now, self.overview.refresh(now, whole=whole))


@contextmanager
def showing(matches: Sequence[MatchRow], boards_a_page: int = 64) -> Iterator[Show]:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", clock)
        patch.setattr(module, "BOARDS_A_PAGE", boards_a_page)
        yield Show(matches, clock, Path("nowhere"))


class Client:
    """A page in a browser: what it knows of the run."""

    def __init__(self, exhibit: LiveExhibit, page: int) -> None:
        self.exhibit, self.page = exhibit, page
        self.seq = -1
        self.seen: list[int] = []
        """Numbers of the deltas that it took."""
        self.state: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        """As the server does: from the nearest page that there is."""
        self.page = self.exhibit.nearest(self.page)
        self._take(*self.exhibit.full(self.page))

    def turn(self, page: int) -> None:
        self.page = page
        self.start()

    def sync(self) -> None:
        """Take what is new, as a stream does."""
        frames = self.exhibit.since(self.page, self.seq)
        if frames is None:
            self.start()
            return
        for seq, frame in frames:
            assert seq > self.seq
            self.seen.append(seq)
            self._take(seq, frame)

    def _take(self, seq: int, data: bytes) -> None:
        frame = json.loads(data, parse_constant=pytest.fail)
        assert frame["seq"] == seq
        self.seq = seq
        if frame["full"]:
            empty: dict[str, Any] = {"agents": {}, "boards": {}, "telemetry": {}, "results": []}
            self.state = {"run": frame["run"], **empty}
        for key in ("fleet", "verdict", "engines", "pages", "ended"):
            self.state[key] = frame[key]
        for agent in frame["agents"]:
            self.state["agents"][agent["name"], agent["game"]] = agent
        for match in frame["gone"]:
            self.state["boards"].pop(match, None)
        for board in frame["boards"]:
            self.state["boards"][board["match"]] = board
        self.state["results"] = frame.get("results", self.state["results"])
        for engine, buckets in frame["telemetry"].items():
            kept = self.state["telemetry"].setdefault(engine, {})
            kept.update((b["at"], b) for b in buckets)
            self.state["telemetry"][engine] = dict(sorted(kept.items())[-TELEMETRY_S:])

    def same(self) -> dict[str, Any]:
        """What it shows; `run` comes with full frames alone."""
        return {key: value for key, value in self.state.items() if key != "run"}


def live(show: Show, run_seed: int, rng: random.Random) -> list[Client]:
    """A random run shown to clients that come, turn pages, sleep and wake at random."""
    run = random_run(run_seed, num_matches=14, num_steps=150)
    clients: list[Client] = []
    for rows in tapped(commits(run, rng)):
        show.look(*rows, after=rng.choice((0.05, 0.25, 0.3, 0.6, 0.25, 45.0)))
        drawn = rng.random()
        if drawn < 0.15:
            clients.append(Client(show.exhibit, rng.randrange(4)))
        elif drawn < 0.2 and clients:
            rng.choice(clients).turn(rng.randrange(4))
        elif drawn < 0.7:
            for client in rng.sample(clients, rng.randrange(len(clients) + 1)):
                client.sync()
    return clients


@given(st.integers(0, 2**32))
@example(0)
@settings(max_examples=25, deadline=None)
def test_whoever_came_when_sees_in_the_end_what_a_newcomer_sees(seed: int) -> None:
    rng = random.Random(seed)
    matches = random_run(seed, num_matches=14, num_steps=150).matches
    with showing(matches, boards_a_page=3) as show:
        clients = live(show, seed, rng)
        show.look(whole=True)
        show.exhibit.end()
        for client in clients:
            client.sync()
            assert client.same() == Client(show.exhibit, client.page).same()
            assert client.state["ended"] is True
            assert show.exhibit.since(client.page, client.seq) == []


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_who_takes_every_frame_is_never_behind_it(seed: int) -> None:
    """Once a frame is made, who has it has all that a full frame of that moment has."""
    rng = random.Random(seed)
    run = random_run(seed, num_matches=14, num_steps=100)
    with showing(run.matches, boards_a_page=3) as show:
        client = Client(show.exhibit, 0)
        for rows in tapped(commits(run, rng)):
            show.look(*rows, after=0.6)
            if rng.random() < 0.3:  # another, in the midst of things
                Client(show.exhibit, 0)
            client.sync()
            assert client.same() == Client(show.exhibit, 0).same()


def running(number: int, **changes: Any) -> MatchRow:
    row = scheduled(number, ("ann", "bob"), CHESS)._replace(id=f"m{number:03}")
    return row._replace(**{"state": "running", "started": 1.0, **changes})


def waiting(*numbers: int) -> list[MatchRow]:
    return [running(n, state="scheduled", started=None) for n in numbers]


def move(number: int, ply: int, at: float) -> PlyRow:
    match = f"m{number:03}"
    return PlyRow(match, ply, ply % 2, "e2e4", "e4", f"fen{ply}", None, at, at, at + 0.1)


def frames_of(show: Show, page: int, seq: int) -> list[dict[str, Any]]:
    frames = show.exhibit.since(page, seq)
    assert frames is not None
    return [json.loads(frame) for _, frame in frames]


def test_a_frame_holds_only_what_changed() -> None:
    with showing(waiting(0, 1)) as show:
        show.look(running(0), running(1))
        seq, _ = show.exhibit.full(0)
        show.look(move(0, 0, 2.0))
        show.look(move(1, 0, 3.0), bucket("main", 1.0, 3.0))
        _, (frame,) = frames_of(show, 0, seq)[0], frames_of(show, 0, seq + 1)
        assert [b["match"] for b in frame["boards"]] == ["m001"]
        assert [b["at"] for b in frame["telemetry"]["main"]] == [3.0]
        assert [a["name"] for a in frame["agents"]] == ["ann"]
        assert (frame["full"], frame["gone"]) == (False, [])
        assert "results" not in frame
        assert "run" not in frame


def test_frames_come_twice_a_second_however_much_happens() -> None:
    with showing(waiting(0)) as show:
        show.look(running(0))
        seq, _ = show.exhibit.full(0)
        for ply in range(100):
            show.look(move(0, ply, 2.0 + ply), after=0.0625)
        told = frames_of(show, 0, seq)
        # 100 looks, eight to a frame
        assert [frame["boards"][0]["ply"] for frame in told] == [*range(8, 100, 8)]


def test_nothing_is_made_while_nobody_looks() -> None:
    with showing(waiting(0)) as show:
        for ply in range(500):
            show.look(running(0), move(0, ply, 2.0 + ply), bucket("main", 1.0, float(ply)))
        assert show.exhibit._pages == {}
        assert show.exhibit._matches == set()
        seq, _ = show.exhibit.full(0)
        show.look(bucket("main", 1.0, 500.0))
        (frame,) = frames_of(show, 0, seq)
        # the newcomer has the others: a page that got them twice drew them twice
        assert [b["at"] for b in frame["telemetry"]["main"]] == [500.0]


def test_a_page_that_nobody_asks_for_any_more_costs_nothing() -> None:
    with showing(waiting(0)) as show:
        show.look(running(0))
        client = Client(show.exhibit, 0)
        for _ in range(29):
            show.look()
        assert set(show.exhibit._pages) == {0}
        client.sync()
        for _ in range(32):
            show.look()
        assert show.exhibit._pages == {}
        assert show.exhibit.since(0, client.seq) is None


def test_frames_kept_are_few_and_who_lags_behind_them_starts_anew() -> None:
    with showing(waiting(0)) as show:
        show.look(running(0))
        lagging, seq = Client(show.exhibit, 0), show.exhibit.full(0)[0]
        for _ in range(module._FRAMES_KEPT):
            show.look()
            show.exhibit._pages[0].asked_at = show.clock.now
        assert len(frames_of(show, 0, seq)) == module._FRAMES_KEPT
        show.look()
        assert show.exhibit.since(0, seq) is None
        assert len(frames_of(show, 0, seq + 1)) == module._FRAMES_KEPT
        lagging.sync()
        assert lagging.seq == seq + module._FRAMES_KEPT + 1


@pytest.mark.parametrize("page", [1, 7, 10_000])
def test_the_last_page_stands_for_one_that_does_not_exist(page: int) -> None:
    """It was empty, and was sent whole again with every frame."""
    with showing(waiting(0)) as show:
        show.look(running(0))
        client = Client(show.exhibit, page)
        assert set(client.state["boards"]) == {"m000"}
        assert client.state["pages"] == {"page": 0, "pages": 1, "boards": 1}
        assert set(show.exhibit._pages) == {0}  # pages that are made up do not fill the memory
        show.look(move(0, 0, 2.0))
        client.sync()
        assert client.seen  # a delta
        assert client.same() == Client(show.exhibit, page).same()


def test_whoever_looks_at_a_page_that_goes_is_shown_the_last_one() -> None:
    with showing(waiting(0, 1), boards_a_page=1) as show:
        show.look(running(0), running(1))
        client = Client(show.exhibit, 1)
        assert set(client.state["boards"]) == {"m001"}
        show.look(running(1, state="scheduled"))
        client.sync()
        assert client.page == 0
        assert set(client.state["boards"]) == {"m000"}


def test_a_seq_that_is_not_known_gives_no_frames() -> None:
    with showing(waiting(0)) as show:
        show.look(running(0))
        seq, _ = show.exhibit.full(0)
        for other in (seq + 1, seq + 1000, seq - 1, -5):
            assert show.exhibit.since(0, other) is None
        assert show.exhibit.since(0, seq) == []


def test_a_board_that_left_and_came_back_between_two_frames_is_not_missed() -> None:
    """A newcomer who looked in between never had it, and it had not changed."""
    with showing(waiting(0, 1, 2), boards_a_page=1) as show:
        show.look(running(1))
        old = Client(show.exhibit, 0)
        show.look()
        old.sync()
        assert set(old.state["boards"]) == {"m001"}
        show.look(running(0), after=0.1)
        new = Client(show.exhibit, 0)
        assert set(new.state["boards"]) == {"m000"}
        show.look(running(0, state="scheduled"), after=0.1)
        show.look()
        for client in (old, new):
            client.sync()
            assert set(client.state["boards"]) == {"m001"}


def test_a_board_stays_ten_seconds_after_its_match_ended() -> None:
    with showing(waiting(0, 1)) as show:
        show.look(running(0), running(1))
        client = Client(show.exhibit, 0)
        show.look(running(0, state="finished", ended=20.0), EventRow(20.0, "x", "{}"))
        client.sync()
        assert client.state["boards"]["m000"]["state"] == "finished"
        show.look(EventRow(30.0, "x", "{}"))
        client.sync()
        assert set(client.state["boards"]) == {"m000", "m001"}
        show.look(EventRow(30.1, "x", "{}"))
        client.sync()
        assert set(client.state["boards"]) == {"m001"}
        assert [result["match"] for result in client.state["results"]] == ["m000"]


def test_when_all_is_over_the_last_boards_stay() -> None:
    with showing(waiting(*range(5)), boards_a_page=3) as show:
        over = [running(n, state="finished", ended=10.0 * n) for n in (3, 0, 4, 1, 2)]
        show.look(*sorted(over, key=lambda row: row.ended or 0.0), EventRow(500.0, "x", "{}"))
        client = Client(show.exhibit, 0)
        assert set(client.state["boards"]) == {"m002", "m003", "m004"}
        assert client.state["pages"]["pages"] == 1


def test_boards_are_in_the_order_of_the_schedule_and_pages_hold_all() -> None:
    with showing(waiting(*range(130))) as show:
        show.look(*(running(n) for n in random.Random(1).sample(range(130), 130)))
        pages = [json.loads(show.exhibit.full(page)[1]) for page in range(3)]
        numbers = [[board["number"] for board in frame["boards"]] for frame in pages]
        assert numbers == [[*range(64)], [*range(64, 128)], [128, 129]]
        assert [frame["pages"]["pages"] for frame in pages] == [3, 3, 3]


def test_the_end_is_told_once_and_for_all() -> None:
    with showing(waiting(0)) as show:
        show.look(running(0))
        client, late = Client(show.exhibit, 0), Client(show.exhibit, 5)
        show.exhibit.end()
        for one in (client, late, Client(show.exhibit, 0)):
            one.sync()
            assert one.state["ended"] is True
            assert show.exhibit.since(one.page, one.seq) == []


async def test_who_waits_is_woken_by_a_frame_and_by_the_end() -> None:
    with showing(waiting(0)) as show:
        show.look(running(0))
        seq, _ = show.exhibit.full(0)
        await show.exhibit.changed(seq - 1)  # there is one already
        waits = [asyncio.create_task(show.exhibit.changed(seq)) for _ in range(3)]
        ends = asyncio.create_task(show.exhibit.changed(seq + 1))
        await asyncio.sleep(0)
        show.look(after=0.1)  # too soon for a frame
        await asyncio.sleep(0)
        assert not any(task.done() for task in waits)
        show.look()
        await asyncio.gather(*waits)
        assert not ends.done()
        show.exhibit.end()
        await ends
        await show.exhibit.changed(seq + 1000)


def test_text_that_is_half_a_character_does_not_end_the_show() -> None:
    """An engine's version is what a user's own class says."""
    detail = json.dumps({"engine": "main", "version": "half a \ud800"})
    with showing(waiting(0)) as show:
        client = Client(show.exhibit, 0)
        show.look(running(0), EventRow(1.0, "engine_ready", detail), whole=True)
        client.sync()
        assert client.state["engines"][0]["version"] == "half a ?"


async def test_details_are_of_what_there_is() -> None:
    with showing(waiting(0, 1)) as show:
        show.look(running(0), running(1), move(0, 0, 2.0), bucket("main", 10.0, 0.0))
        exhibit = show.exhibit
        assert exhibit.histogram("nobody", "chess") is None
        assert exhibit.histogram("ann", "janggi") is None
        told = exhibit.histogram("ann", "chess")
        assert told is not None
        assert sum(told["counts"]) == 1
        assert len(told["edges_ms"]) == len(told["counts"]) + 1
        assert await exhibit.telemetry("main", 7) is None
        assert await exhibit.telemetry("nobody", 10) is None
        buckets = await exhibit.telemetry("main", 10)
        assert buckets is not None
        assert (buckets["span_s"], [b["at"] for b in buckets["buckets"]]) == (10, [0.0])
        assert await exhibit.metrics() == "arena_plies_total 0\n"


async def test_results_are_paged_newest_first() -> None:
    with showing(waiting(*range(7))) as show:
        show.look(*(running(n, state="finished", ended=float(n)) for n in range(7)))

        async def page(offset: int, limit: int) -> list[str]:
            told = await show.exhibit.results(offset, limit, Wish())
            assert told["total"] == 7
            return [result["match"] for result in told["results"]]

        assert await page(0, 3) == ["m006", "m005", "m004"]
        assert await page(3, 50) == ["m003", "m002", "m001", "m000"]
        assert await page(7, 50) == await page(0, 0) == []


async def test_a_match_is_read_from_the_run_s_folder(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, waiting(0, 1))
    await store.commit(running(0), move(0, 0, 2.0))
    await store.close()
    figures = Figures(RUN, waiting(0, 1), exact=False)
    exhibit = LiveExhibit(Overview(figures), tmp_path / "run", no_metrics)
    told = await exhibit.match("m000")
    assert told is not None
    assert [ply["late"] for ply in told["plies"]] == [False]
    not_begun = await exhibit.match("m001")
    assert not_begun is not None
    assert not_begun["plies"] == []
    assert await exhibit.match("../m000") is None


def test_games_are_drawn_where_they_can_be_loaded() -> None:
    told = drawings({"chess", "janggi", "nowhere:Game"})
    assert told["nowhere:Game"] == {"drawing": None, "side_names": ["first", "second"]}
    assert len(told["chess"]["side_names"]) == len(told["janggi"]["side_names"]) == 2
    assert told["chess"]["drawing"]["ranks"] == 8
    json.dumps(told, allow_nan=False)


def test_a_page_learns_when_no_more_matches_can_come() -> None:
    """And that once: what a run is comes with full frames else."""
    with showing([scheduled(0, ("ann", "bob"), CHESS)]) as show:
        show.figures.can_grow = True
        show.exhibit.full(0)
        show.look()
        seq, frame = show.exhibit.full(0)
        assert json.loads(frame)["run"]["can_grow"]
        show.look(EventRow(1.0, "schedule_complete", "{}"))
        show.look()
        frames = show.exhibit.since(0, seq)
        assert frames is not None
        told = [json.loads(data).get("run") for _, data in frames]
        assert [run["can_grow"] for run in told if run is not None] == [False]
