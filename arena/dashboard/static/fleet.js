/** The fleet: totals, the saturation verdict, and what each engine does over time. */

import { ENGINE_CHARTS, TimeChart } from "./charts.js";
import { choiceButtons, el, setHidden, setText } from "./dom.js";
import { ReplicaTable } from "./replicas.js";
import { clock, isKnown, percent, rounded, sum, tally, tenths, UNKNOWN, whole, words } from "./text.js";

const LIVE_WINDOW_S = 300;
const HOUR_S = 3600;
const MOST_BUCKETS = 720;
const RANGES = [
  ["live", "5 min"],
  ["hour", "1 h"],
  ["all", "All"],
];
const PATTERNS = new Map([
  ["steady", "steady: capacity is short"],
  ["sawtooth", "in bursts that drain again: a queue can absorb them"],
]);

/** The finest span whose buckets over `seconds` a chart can show. */
function spanFor(seconds) {
  return [1, 10, 100, 1000].find((span) => seconds / span <= MOST_BUCKETS) ?? 1000;
}

/** The verdict's head line, in one place for the page and for what a screen reader hears. */
export function verdictTitle(verdict, engines) {
  const pattern = PATTERNS.get(verdict.pattern);
  const engine = engines.length > 1 ? `Engine ${verdict.engine}: ` : "";
  return `${engine}${words(verdict.signal)}${pattern ? `, ${pattern}` : ""}`;
}

const TOTALS = [
  [
    "moves",
    "Moves a second",
    ({ fleet, isEnded }) => tenths((isEnded ? null : fleet.recent_moves_per_s) ?? fleet.moves_per_s),
    ({ fleet }) => `${tenths(fleet.moves_per_s)} over the run`,
  ],
  [
    "pace",
    "Pace attained",
    ({ fleet }) => percent(fleet.pace_attainment),
    ({ fleet }) => `worst seat ${percent(fleet.min_seat_attainment)}`,
  ],
  [
    "slo",
    "Moves in time",
    ({ fleet }) => percent(fleet.slo_attainment),
    ({ run }) => (isKnown(run?.slo_ms) ? `within ${whole(run.slo_ms)} ms` : "SLO"),
  ],
  [
    "games",
    "Games an hour",
    ({ fleet }) => whole(fleet.games_per_h),
    ({ fleet }) => `${whole(fleet.plies)} moves so far`,
  ],
  [
    "elapsed",
    "Elapsed",
    ({ fleet }) => clock(fleet.elapsed_s),
    ({ fleet }) => `start lag p95 ${rounded(fleet.schedule_lag_ms?.p95)} ms`,
  ],
];

/** The row of large numbers; the first of them is the progress of the matches. */
class Totals {
  #cells = new Map();
  #bar = el("progress", { "aria-label": "finished matches" });
  #matches = el("dd", { class: "total-value", "data-testid": "total-finished" });
  #states = el("dd", { class: "total-note", "data-testid": "total-states" });

  constructor() {
    this.element = el("dl", { class: "totals", "data-testid": "totals" });
    this.element.append(
      el(
        "div",
        { class: "total wide" },
        el("dt", {}, "Matches finished"),
        this.#matches,
        el("dd", {}, this.#bar),
        this.#states,
      ),
    );
    for (const [id, name] of TOTALS) {
      const value = el("dd", { class: "total-value", "data-testid": `total-${id}` });
      const note = el("dd", { class: "total-note" });
      this.#cells.set(id, { value, note });
      this.element.append(el("div", { class: "total" }, el("dt", {}, name), value, note));
    }
  }

  update(state) {
    const { scheduled, running, suspended, finished } = state.fleet.matches;
    const all = scheduled + running + suspended + finished;
    const { canGrow } = state;
    setText(this.#matches, canGrow ? whole(finished) : `${whole(finished)} of ${whole(all)}`);
    this.#bar.max = Math.max(1, all);
    this.#bar.value = finished;
    setHidden(this.#bar, canGrow);
    setText(
      this.#states,
      `${whole(running)} running · ${whole(suspended)} suspended · ${whole(scheduled)} scheduled` +
        (canGrow ? ", more may come" : ""),
    );
    for (const [id, , value, note] of TOTALS) {
      const cell = this.#cells.get(id);
      setText(cell.value, value(state));
      setText(cell.note, note(state));
    }
  }
}

/** Is the engine saturating, why, and what helps, cheapest first. */
class VerdictPanel {
  #eyebrow = el("p", { class: "eyebrow" });
  #title = el("h3", { "data-testid": "verdict-title" });
  #detail = el("p", { class: "verdict-detail" });
  #remedies = el("ol", { class: "remedies", "data-testid": "remedies" });
  #shown = null;

  constructor() {
    this.element = el(
      "section",
      { class: "verdict", "data-testid": "verdict", "aria-label": "Saturation" },
      this.#eyebrow,
      this.#title,
      this.#detail,
      this.#remedies,
    );
  }

  update(state) {
    const { verdict } = state;
    setText(this.#eyebrow, state.isEnded ? "Saturation over the run" : "Saturation now");
    const isAlarm = verdict !== null && verdict !== undefined;
    this.element.classList.toggle("alarm", isAlarm);
    const title = isAlarm ? verdictTitle(verdict, state.engines) : this.#calm(state);
    setText(this.#title, isAlarm ? `⚠ ${title.charAt(0).toUpperCase()}${title.slice(1)}` : title);
    const since = isAlarm && isKnown(verdict.since_s) ? ` Since ${clock(verdict.since_s)} of the run.` : "";
    setText(this.#detail, isAlarm ? `${verdict.detail}${since}` : this.#calmDetail(state));
    this.#showRemedies(isAlarm ? verdict.remedies : []);
  }

  #calm(state) {
    if (state.engines.length === 0)
      return state.fleet.plies ? "No engine in this run" : "Nothing has been played yet";
    return state.fleet.plies ? "✓ No sign of saturation" : "The engine is starting";
  }

  #calmDetail(state) {
    if (state.engines.length === 0) return "The agents decide without a model, so there is no batch to fill.";
    if (!state.fleet.plies) return "No moves yet: loading a model and its first steps may take a minute.";
    return "Queue, time to first token, speed of each stream, preemptions and refusals are watched.";
  }

  #showRemedies(remedies) {
    const text = JSON.stringify(remedies);
    if (text === this.#shown) return;
    this.#shown = text;
    this.#remedies.replaceChildren(
      ...remedies.map(({ action, effect }) =>
        el("li", {}, el("span", { class: "remedy" }, action), el("span", { class: "effect" }, effect)),
      ),
    );
    setHidden(this.#remedies, remedies.length === 0);
  }
}

function meanAndTail(figures) {
  if (isKnown(figures)) return rounded(figures);
  return isKnown(figures?.mean) ? `${rounded(figures.mean)} mean · ${rounded(figures.p95)} p95` : UNKNOWN;
}

function sharesAndTail(figures) {
  if (isKnown(figures)) return percent(figures);
  return isKnown(figures?.mean) ? `${percent(figures.mean)} mean · ${percent(figures.p95)} p95` : UNKNOWN;
}

function perGame(figures) {
  return (
    Object.entries(figures ?? {})
      .map(([game, count]) => `${game} ${rounded(count)}`)
      .join(" · ") || UNKNOWN
  );
}

const ENGINE_FIGURES = [
  ["Batch filled", (engine) => sharesAndTail(engine.occupancy)],
  ["Requests in a step", (engine) => meanAndTail(engine.step_requests)],
  ["Tokens in a step", (engine) => meanAndTail(engine.step_tokens)],
  ["KV cache in use", (engine) => sharesAndTail(engine.kv_usage)],
  ["Prefix cache hits", (engine) => percent(engine.prefix_hit_rate)],
  ["Uncached prompt tokens a move", (engine) => perGame(engine.uncached_prompt_tokens_per_move)],
  ["Output tokens a move", (engine) => rounded(engine.output_tokens_per_move)],
  ["Preemptions", (engine) => whole(engine.preemptions)],
  ["Refused requests", (engine) => whole(engine.rejected)],
  ["Restarts", (engine) => whole(engine.restarts)],
];

/** One engine: its replicas, its charts and its figures over the run. */
class EnginePanel {
  #name;
  #source;
  #charts = ENGINE_CHARTS.map((spec) => new TimeChart(spec));
  #version = el("span", { class: "muted" });
  #replicas;
  #figures = ENGINE_FIGURES.map(([name]) => [el("dt", {}, name), el("dd")]);
  #stored = null;
  #askedAt = -Infinity;
  #onData;

  /** `onData()` is called when buckets that were asked for have come. */
  constructor(name, source, onData) {
    this.#onData = onData;
    this.#name = name;
    this.#source = source;
    this.#replicas = new ReplicaTable(name);
    const figures = el(
      "dl",
      { class: "figures", "data-testid": "engine-figures" },
      ...this.#figures.map((pair) => el("div", {}, ...pair)),
    );
    this.element = el(
      "section",
      { class: "engine", "data-testid": "engine", "aria-label": `Engine ${name}` },
      el("h3", {}, "Engine ", el("span", { class: "name" }, name), " ", this.#version),
      this.#replicas.element,
      el("div", { class: "charts" }, ...this.#charts.map((chart) => chart.element), figures),
    );
  }

  update(state, engine, range) {
    setText(this.#version, `${engine.kind} ${engine.version ?? ""}`);
    for (const [index, [, text]] of ENGINE_FIGURES.entries()) setText(this.#figures[index][1], text(engine));
    this.#replicas.update(engine.replicas);
    const now = state.fleet.now_s;
    const window = { live: LIVE_WINDOW_S, hour: HOUR_S, all: Infinity }[range];
    const earliest = Math.max(0, now - window);
    const buckets = this.#buckets(state, now - earliest, range);
    const from = range === "all" ? (buckets[0]?.at ?? 0) : earliest;
    const to = Math.max(now, from + 60);
    const limits = new Map(Object.entries(state.run?.engines ?? {})).get(this.#name) ?? null;
    for (const chart of this.#charts) chart.setData(buckets, [from, to], limits);
  }

  paint() {
    for (const chart of this.#charts) chart.paint(true);
  }

  /** Buckets from the frames while they reach back far enough, else those the arena kept. */
  #buckets(state, seconds, range) {
    const recent = state.telemetry.get(this.#name) ?? [];
    if (!this.#source.isStatic && seconds <= LIVE_WINDOW_S) return recent;
    this.#fetch(spanFor(seconds), `${range} ${spanFor(seconds)}`, state);
    return this.#stored?.buckets ?? recent;
  }

  #fetch(span, wish, state) {
    const isDue =
      performance.now() - this.#askedAt > Math.min(span, 30) * 1000 &&
      !this.#source.isStatic &&
      !state.isEnded;
    if (this.#stored?.wish === wish && !isDue) return;
    if (this.#stored?.wish !== wish) this.#stored = { wish, buckets: this.#stored?.buckets };
    this.#askedAt = performance.now();
    this.#source.telemetry(this.#name, span).then(
      (answer) => {
        if (this.#stored.wish !== wish || !answer) return;
        this.#stored = { wish, buckets: answer.buckets };
        this.#onData();
      },
      () => undefined, // the connection's state is shown by the page; the next update asks again
    );
  }
}

export class FleetView {
  #page;
  #totals = new Totals();
  #verdict;
  #engines = new Map();
  #panels = el("div");
  #faults = el("p", { class: "faults", "data-testid": "infrastructure-faults" });
  #range;
  #ranges;

  constructor(root, page) {
    this.#page = page;
    this.#verdict = new VerdictPanel();
    this.#range = page.source.isStatic ? "all" : "live";
    const choose = (range) => {
      this.#range = range;
      this.update();
      for (const panel of this.#engines.values()) panel.paint();
    };
    const buttons = choiceButtons("Time shown", RANGES, this.#range, choose, "range");
    this.#ranges = el("div", { class: "bar" }, el("h2", {}, "Engines"), buttons);
    root.append(this.#totals.element, this.#faults, this.#verdict.element, this.#ranges, this.#panels);
  }

  update() {
    const { state, source } = this.#page;
    if (!state.fleet) return;
    this.#totals.update(state);
    this.#verdict.update(state);
    const faults = state.fleet.infrastructure_faults;
    setHidden(this.#faults, sum(faults) === 0);
    setText(this.#faults, `Infrastructure faults, which cost no player a game: ${tally(faults)}`);
    setHidden(this.#ranges, state.engines.length === 0);
    for (const engine of state.engines) {
      if (!this.#engines.has(engine.name)) this.#add(engine.name, source);
      this.#engines.get(engine.name).update(state, engine, this.#range);
    }
  }

  /** Draws the charts again, after the theme changed or the library arrived. */
  paint() {
    for (const panel of this.#engines.values()) panel.paint();
  }

  #add(name, source) {
    const panel = new EnginePanel(name, source, () => {
      this.update();
      panel.paint();
    });
    this.#engines.set(name, panel);
    this.#panels.append(panel.element);
  }
}
