/** Charts by plotly. Only our own words go into a plot: plotly reads some markup in text. */

import { el, setText } from "./dom.js";
import { clock, isKnown, percent, rounded, whole } from "./text.js";

const REDRAW_MS = 1000;
const TABLE_ROWS = 12;
const SILENT_BUCKETS = 5;
const TICK_STEPS = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const BARE = { showgrid: false, ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)" };
const CONFIG = { displayModeBar: false, responsive: false, doubleClick: false, showTips: false };

function inMilliseconds(seconds) {
  return isKnown(seconds) ? seconds * 1000 : null;
}

function hitRate(bucket) {
  return bucket.prefix_queries > 0 && isKnown(bucket.prefix_hits)
    ? bucket.prefix_hits / bucket.prefix_queries
    : null;
}

/** What is drawn of an engine: lines, the band above the first of them, a limit, or bars. */
export const ENGINE_CHARTS = [
  {
    id: "requests",
    title: "Requests in a step",
    lines: [{ name: "p50", value: (bucket) => bucket.requests_p50 }],
    band: { name: "to p95", value: (bucket) => bucket.requests_p95 },
    limit: { name: "batch limit", value: (engine) => engine?.batch_limit },
    format: whole,
  },
  {
    id: "tokens",
    title: "Tokens in a step",
    lines: [{ name: "p50", value: (bucket) => bucket.tokens_p50 }],
    band: { name: "to p95", value: (bucket) => bucket.tokens_p95 },
    limit: { name: "max_batched_tokens", value: (engine) => engine?.max_batched_tokens },
    format: whole,
  },
  {
    id: "queue",
    title: "Requests waiting",
    lines: [{ name: "mean", value: (bucket) => bucket.waiting_mean }],
    band: { name: "to peak", value: (bucket) => bucket.waiting_max },
    format: rounded,
  },
  {
    id: "ttft",
    title: "Time to first token, ms",
    lines: [{ name: "p50", value: (bucket) => inMilliseconds(bucket.ttft_p50_s) }],
    band: { name: "to p95", value: (bucket) => inMilliseconds(bucket.ttft_p95_s) },
    format: whole,
  },
  {
    id: "kv",
    title: "KV cache in use",
    lines: [{ name: "peak", value: (bucket) => bucket.kv_usage }],
    isShare: true,
    format: percent,
  },
  {
    id: "prefix",
    title: "Prefix cache hits",
    lines: [{ name: "of prompt tokens", value: hitRate }],
    isShare: true,
    format: percent,
  },
  {
    id: "stream",
    title: "Tokens a second, each stream",
    lines: [{ name: "median", value: (bucket) => bucket.stream_tokens_per_s }],
    format: rounded,
  },
  {
    id: "trouble",
    title: "Preempted and refused",
    bars: [
      { name: "preempted", value: (bucket) => bucket.preemptions },
      { name: "refused", value: (bucket) => bucket.rejected },
    ],
    format: whole,
  },
];

let palette = null;

/** Colours are read from the style sheet once; call this when the theme changes. */
export function forgetPalette() {
  palette = null;
}

function colours() {
  if (palette) return palette;
  const probe = el("span", { hidden: "" });
  document.body.append(probe);
  const read = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  palette = {
    text: read("--muted"),
    grid: read("--grid"),
    line: read("--accent"),
    band: read("--band"),
    limit: read("--limit"),
    panel: read("--panel"),
    font: getComputedStyle(document.body).fontFamily,
  };
  probe.remove();
  return palette;
}

/** Everything that a chart shows of a bucket, as {name, value(bucket)}. */
function columnsOf({ lines = [], band, bars = [] }) {
  return [...lines, ...(band ? [band] : []), ...bars];
}

function ceiling(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return (
    [1, 1.5, 2, 3, 4, 5, 8, 10].map((step) => step * unit).find((step) => step >= value * 0.999) ?? value
  );
}

/** Runs of adjacent buckets with a known value; a hole in `at` or an unknown value parts them. */
function segments(buckets, value) {
  const runs = [];
  let end = null;
  for (const bucket of buckets) {
    if (!isKnown(value(bucket))) continue;
    if (end === null || bucket.at - end > bucket.span_s * 0.01) runs.push([]);
    runs.at(-1).push(bucket);
    end = bucket.at + bucket.span_s;
  }
  return runs;
}

/** Points of a line over the buckets' spans; null between segments. */
function linePoints(buckets, value) {
  const [x, y] = [[], []];
  for (const run of segments(buckets, value)) {
    for (const bucket of run) {
      x.push(bucket.at);
      y.push(value(bucket));
    }
    const last = run.at(-1);
    x.push(last.at + last.span_s, null);
    y.push(value(last), null);
  }
  return { x, y };
}

/** Closed outlines between two values, one a segment. */
function bandPoints(buckets, low, high) {
  const [x, y] = [[], []];
  for (const run of segments(buckets, (bucket) => (isKnown(low(bucket)) ? high(bucket) : null))) {
    const last = run.at(-1);
    const edge = [...run.map((bucket) => [bucket.at, bucket]), [last.at + last.span_s, last]];
    for (const [at, bucket] of edge) {
      x.push(at);
      y.push(high(bucket));
    }
    for (const [at, bucket] of edge.reverse()) {
      x.push(at);
      y.push(low(bucket));
    }
    x.push(null);
    y.push(null);
  }
  return { x, y };
}

function tracesOf(spec, buckets) {
  const paint = colours();
  const traces = [];
  if (spec.band) {
    const points = bandPoints(buckets, spec.lines[0].value, spec.band.value);
    traces.push({
      ...points,
      mode: "lines",
      line: { width: 0 },
      fill: "toself",
      fillcolor: paint.band,
      hoverinfo: "skip",
    });
  }
  for (const line of spec.lines ?? []) {
    const points = linePoints(buckets, line.value);
    const text = points.y.map((value) => `${line.name} ${spec.format(value)}`);
    traces.push({
      ...points,
      text,
      hoverinfo: "text",
      mode: "lines",
      line: { width: 1.5, color: paint.line },
    });
  }
  for (const [index, bar] of (spec.bars ?? []).entries()) {
    const some = buckets.filter((bucket) => bar.value(bucket) > 0);
    traces.push({
      type: "bar",
      x: some.map((bucket) => bucket.at + bucket.span_s / 2),
      y: some.map(bar.value),
      width: some.map((bucket) => bucket.span_s),
      text: some.map((bucket) => `${bar.name} ${spec.format(bar.value(bucket))}`),
      hoverinfo: "text",
      textposition: "none",
      marker: index ? { color: paint.panel, line: { color: paint.line, width: 1 } } : { color: paint.line },
    });
  }
  return traces;
}

function greatest(spec, buckets) {
  let most = 0;
  for (const { value } of columnsOf(spec))
    for (const bucket of buckets) most = Math.max(most, value(bucket) ?? 0);
  return most;
}

function timeAxis([from, to]) {
  const step = TICK_STEPS.find((one) => (to - from) / one <= 6) ?? TICK_STEPS.at(-1);
  const ticks = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) ticks.push(at);
  return { range: [from, to], tickvals: ticks, ticktext: ticks.map(clock), ...BARE };
}

function layoutOf(size, xaxis, yaxis) {
  const paint = colours();
  const axis = {
    fixedrange: true,
    zeroline: false,
    gridcolor: paint.grid,
    linecolor: paint.grid,
    showline: false,
  };
  return {
    ...size,
    autosize: false,
    margin: { l: 46, r: 10, t: 8, b: 24 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: paint.font, size: 11, color: paint.text },
    showlegend: false,
    hovermode: "x",
    dragmode: false,
    hoverlabel: { bgcolor: paint.panel, bordercolor: paint.grid, font: { family: paint.font, size: 11 } },
    barmode: "stack",
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, nticks: 4, ...yaxis },
    shapes: [],
    annotations: [],
  };
}

/** A figure with a title, a plot, keys to it and its numbers as a table. */
class Figure {
  element;
  isInView = false;
  #paintedAt = 0;
  #size = null;
  #timer = null;

  /** `keys` explain the plot, `headings` name the columns of its table. */
  constructor(title, keys, headings, testId) {
    this.plot = el("div", { class: "plot", "aria-hidden": "true" });
    this.value = el("span", { class: "figure-value" });
    this.table = el("tbody");
    this.note = el("p", { class: "plot-note" });
    const head = el("thead", {}, el("tr", {}, ...headings.map((text) => el("th", { scope: "col" }, text))));
    const scroll = { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}: values` };
    const table = el("table", { class: "values" }, head, this.table);
    this.details = el("details", {}, el("summary", {}, "Values"), el("div", scroll, table));
    this.element = el(
      "figure",
      { class: "figure", "data-testid": testId },
      el("figcaption", {}, el("span", { class: "figure-title" }, title), this.value),
      el("div", { class: "plot-frame" }, this.plot, this.note),
      el("div", { class: "figure-foot" }, el("div", { class: "keys" }, ...keys), this.details),
    );
    this.details.addEventListener("toggle", () => this.fillTable());
    Figure.#seen.observe(this.element);
    Figure.#sized.observe(this.plot);
    Figure.#byNode.set(this.element, this).set(this.plot, this);
  }

  /** Paints when it is worth it: in view, tab visible, and not within a second of the last time. */
  paint(isForced = false) {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (!this.isInView || document.hidden || !this.#size) return;
    const wait = this.#paintedAt + REDRAW_MS - performance.now();
    if (wait > 0 && !isForced) {
      this.#timer = setTimeout(() => this.paint(), wait);
      return;
    }
    this.#paintedAt = performance.now();
    this.fillTable();
    if (!globalThis.Plotly) {
      setText(
        this.note,
        document.readyState === "complete" ? "The chart library could not be loaded; see Values." : "",
      );
      return;
    }
    const { traces, layout, note } = this.draw(this.#size);
    setText(this.note, note);
    globalThis.Plotly.react(this.plot, traces, layout, CONFIG);
  }

  static #byNode = new WeakMap();

  static #seen = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        const figure = Figure.#byNode.get(target);
        figure.isInView = isIntersecting;
        if (isIntersecting) figure.paint();
      }
    },
    { rootMargin: "150px" },
  );

  static #sized = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const figure = Figure.#byNode.get(target);
      if (contentRect.width < 40) continue;
      figure.#size = { width: Math.floor(contentRect.width), height: Math.floor(contentRect.height) };
      figure.paint(true);
    }
  });
}

function swatch(kind, text) {
  return el("span", { class: "key" }, el("i", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);
}

/** Why a chart is empty: after some buckets without a value, the engine does not report it. */
function emptyNote(buckets) {
  return buckets.length >= SILENT_BUCKETS ? "Not reported by this engine" : "No figures yet";
}

/** One chart of ENGINE_CHARTS over the time of the run. */
export class TimeChart extends Figure {
  #spec;
  #buckets = [];
  #range = [0, 60];
  #engine = null;

  constructor(spec) {
    const keys = (spec.lines ?? []).map((line) => swatch("line", line.name));
    if (spec.band) keys.push(swatch("band", spec.band.name));
    if (spec.limit) keys.push(swatch("limit", spec.limit.name));
    keys.push(...(spec.bars ?? []).map((bar, index) => swatch(index ? "open" : "full", bar.name)));
    super(spec.title, keys, ["run time", ...columnsOf(spec).map(({ name }) => name)], `chart-${spec.id}`);
    this.#spec = spec;
  }

  /** `engine` has the limits (or is null); `range` is [from, to] in seconds of the run. */
  setData(buckets, range, engine) {
    this.#buckets = buckets;
    this.#range = range;
    this.#engine = engine;
    setText(this.value, this.#latest());
    this.paint();
  }

  #latest() {
    const last = this.#buckets.at(-1);
    if (!last) return "";
    const columns = columnsOf(this.#spec);
    const texts = columns.map(({ value }) => this.#spec.format(value(last) ?? null));
    if (texts.length === 1) return texts[0];
    return columns.map(({ name }, index) => `${name.replace("to ", "")} ${texts[index]}`).join(" · ");
  }

  fillTable() {
    if (!this.details.open) return;
    const rows = this.#buckets.slice(-TABLE_ROWS).reverse();
    this.table.replaceChildren(
      ...rows.map((bucket) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, clock(bucket.at)),
          ...columnsOf(this.#spec).map(({ value }) => el("td", {}, this.#spec.format(value(bucket) ?? null))),
        ),
      ),
    );
  }

  draw(size) {
    const [from, to] = this.#range;
    const buckets = this.#buckets.filter((bucket) => bucket.at + bucket.span_s >= from);
    const isEmpty = !buckets.some((bucket) =>
      columnsOf(this.#spec).some(({ value }) => isKnown(value(bucket))),
    );
    const layout = layoutOf(
      size,
      timeAxis([from, to]),
      isEmpty ? { range: [0, 1], visible: false } : this.#valueAxis(buckets),
    );
    if (!isEmpty) this.#addLimit(layout);
    return { traces: tracesOf(this.#spec, buckets), layout, note: isEmpty ? emptyNote(buckets) : "" };
  }

  #valueAxis(buckets) {
    if (this.#spec.isShare)
      return { range: [0, 1.04], tickvals: [0, 0.5, 1], ticktext: ["0", "50 %", "100 %"] };
    const most = greatest(this.#spec, buckets);
    const limit = this.#limit();
    const top =
      limit && most > limit / 4 ? Math.max(limit, most) : ceiling(Math.max(most, this.#spec.bars ? 4 : 1));
    return { range: [0, top * 1.06] };
  }

  #limit() {
    const limit = this.#spec.limit?.value(this.#engine);
    return isKnown(limit) ? limit : null;
  }

  #addLimit(layout) {
    const limit = this.#limit();
    if (limit === null) return;
    const isShown = limit <= layout.yaxis.range[1];
    if (isShown) {
      layout.shapes.push({
        type: "line",
        xref: "paper",
        x0: 0,
        x1: 1,
        y0: limit,
        y1: limit,
        line: { color: colours().limit, width: 1, dash: "dash" },
      });
    } else {
      const text = `limit ${whole(limit)}, above this chart`;
      layout.annotations.push({
        xref: "paper",
        yref: "paper",
        x: 1,
        y: 1,
        xanchor: "right",
        yanchor: "top",
        showarrow: false,
        text,
      });
    }
  }
}

/** Latencies of one agent: bars of equal width, since the edges grow with the time. */
export class Histogram extends Figure {
  #edges = [];
  #counts = [];
  #slo = null;

  constructor() {
    const keys = [swatch("full", "moves"), swatch("limit", "SLO")];
    super("Latency of its moves", keys, ["from, ms", "to, ms", "moves"], "chart-histogram");
  }

  /** n + 1 edges and n counts (empty outer bars are left out), and the SLO in ms or null. */
  setData(histogram, slo) {
    const counts = histogram?.counts ?? [];
    const first = Math.max(
      0,
      counts.findIndex((count) => count > 0),
    );
    const last = counts.findLastIndex((count) => count > 0);
    this.#counts = counts.slice(first, last + 1);
    this.#edges = (histogram?.edges_ms ?? []).slice(first, last + 2);
    this.#slo = isKnown(slo) ? slo : null;
    setText(this.value, `${whole(this.#counts.reduce((total, count) => total + count, 0))} moves`);
    this.paint();
  }

  fillTable() {
    if (!this.details.open) return;
    const edge = (index) => el("td", {}, isKnown(this.#edges[index]) ? rounded(this.#edges[index]) : "∞");
    this.table.replaceChildren(
      ...this.#counts.map((count, index) =>
        el("tr", {}, edge(index), edge(index + 1), el("td", {}, whole(count))),
      ),
    );
  }

  draw(size) {
    const paint = colours();
    const text = this.#edges.map((edge) => (isKnown(edge) ? rounded(edge) : "∞"));
    const every = Math.ceil(text.length / Math.max(2, Math.floor(size.width / 60)));
    const ticks = text.map((_, index) => index).filter((index) => index % every === 0);
    const slo = this.#sloPosition();
    const right = Math.max(this.#counts.length, slo ?? 0);
    const top = ceiling(Math.max(1, ...this.#counts));
    const layout = layoutOf(
      size,
      {
        range: [Math.min(-0.1, (slo ?? 0) - 0.2), right + 0.3],
        tickvals: ticks,
        ticktext: ticks.map((index) => text[index]),
        ...BARE,
      },
      { range: [0, top * 1.06], ...(top <= 4 ? { dtick: 1 } : {}) },
    );
    layout.hovermode = "closest";
    layout.margin.t = 20;
    if (slo !== null) {
      const isBeyond = slo > this.#counts.length;
      if (!isBeyond)
        layout.shapes.push({
          type: "line",
          yref: "paper",
          y0: 0,
          y1: 1,
          x0: slo,
          x1: slo,
          line: { color: paint.limit, width: 1.5, dash: "dash" },
        });
      layout.annotations.push({
        yref: "paper",
        y: 1,
        x: slo,
        xanchor: slo > right / 2 ? "right" : "left",
        yanchor: "bottom",
        showarrow: false,
        text: isBeyond ? `SLO ${whole(this.#slo)} ms, beyond this chart` : ` SLO ${whole(this.#slo)} ms `,
      });
    }
    const bars = {
      type: "bar",
      x: this.#counts.map((_, index) => index + 0.5),
      y: this.#counts,
      width: 0.94,
      text: this.#counts.map((count, index) => `${text[index]}–${text[index + 1]} ms: ${whole(count)}`),
      hoverinfo: "text",
      textposition: "none",
      marker: { color: paint.line },
    };
    return { traces: [bars], layout, note: this.#counts.length ? "" : "No moves yet" };
  }

  /** Where the SLO stands among the bars; left of the first is -0.1, right of the last its end. */
  #sloPosition() {
    if (this.#slo === null || this.#counts.length === 0) return null;
    const edges = this.#edges.map((edge) => (isKnown(edge) ? edge : Infinity));
    const index = edges.findIndex((edge) => edge > this.#slo);
    if (index === 0) return -0.1;
    if (index < 0) return this.#counts.length + 0.1;
    const [low, high] = [edges[index - 1], edges[index]];
    return index - 1 + (high === Infinity ? 0.5 : (this.#slo - low) / (high - low));
  }
}
