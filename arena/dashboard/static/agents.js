/** The agents: a table to sort and filter, and the latencies of the one selected. */

import { Histogram } from "./charts.js";
import { el, setAttribute, setHidden, setText } from "./dom.js";
import { agentKey } from "./state.js";
import { isKnown, rounded, sum, tally, whole, words } from "./text.js";

const UPDATE_MS = 1000;
const HISTOGRAM_MS = 2000;
const SORT_MS = 5000;
const PARTS = ["queue", "prefill", "decode", "harness"];

function columnOf(id, title, value, format, group = "") {
  return { id, title, value, format, group };
}

const AS_TEXT = (text) => text;
const COLUMNS = [
  columnOf("name", "Agent", (agent) => agent.name, AS_TEXT),
  columnOf("game", "Game", (agent) => agent.game, AS_TEXT),
  columnOf("mode", "Mode", (agent) => words(agent.mode), AS_TEXT),
  columnOf("moves", "Moves", (agent) => agent.moves, whole),
  columnOf("p50", "p50", (agent) => agent.latency_ms?.p50, whole, "Latency, ms"),
  columnOf("p95", "p95", (agent) => agent.latency_ms?.p95, whole, "Latency, ms"),
  columnOf("p99", "p99", (agent) => agent.latency_ms?.p99, whole, "Latency, ms"),
  ...PARTS.map((part) =>
    columnOf(part, part, (agent) => agent[`${part}_ms`]?.p50, whole, "Median of its parts, ms"),
  ),
  columnOf("failures", "Failures", (agent) => sum(agent.faults), whole),
  columnOf("kinds", "By kind", (agent) => tally(agent.faults), AS_TEXT),
  columnOf("prompt", "prompt", (agent) => agent.prompt_tokens_per_move, rounded, "Tokens a move"),
  columnOf(
    "uncached",
    "uncached",
    (agent) => agent.uncached_prompt_tokens_per_move,
    rounded,
    "Tokens a move",
  ),
  columnOf("output", "output", (agent) => agent.output_tokens_per_move, rounded, "Tokens a move"),
];
const TEXT_COLUMNS = new Set(["name", "game", "mode", "kinds"]);

/** Unknown values come last whichever way the column is sorted. */
function compare(a, b, direction) {
  const isText = typeof a === "string" || typeof b === "string";
  const [hasA, hasB] = isText ? [Boolean(a), Boolean(b)] : [isKnown(a), isKnown(b)];
  if (!hasA || !hasB) return Number(hasB) - Number(hasA);
  return direction * (isText ? a.localeCompare(b) : a - b);
}

/** A row keeps the texts it shows, so that an update touches only the cells that differ. */
class AgentRow {
  #cells;
  #texts = [];

  constructor(key, select) {
    this.key = key;
    this.button = el("button", { type: "button", class: "name row-name" });
    this.#cells = COLUMNS.map(({ id }) =>
      el(id === "name" ? "th" : "td", { class: TEXT_COLUMNS.has(id) ? "text" : "number" }),
    );
    this.#cells[0].setAttribute("scope", "row");
    this.#cells[0].append(this.button);
    this.element = el("tr", { "data-testid": "agent" }, ...this.#cells);
    this.element.addEventListener("click", () => select(this));
  }

  update(agent) {
    this.agent = agent;
    for (const [index, { value, format }] of COLUMNS.entries()) {
      const text = format(value(agent));
      if (text === this.#texts[index]) continue;
      this.#texts[index] = text;
      const target = index === 0 ? this.button : this.#cells[index];
      target.textContent = text;
      if (TEXT_COLUMNS.has(COLUMNS[index].id)) target.title = text;
    }
  }
}

export class AgentsView {
  #page;
  #rows = new Map();
  #order = [];
  #sort = { index: 5, direction: -1 };
  #headings;
  #filter = el("input", {
    type: "search",
    id: "agent-filter",
    placeholder: "name, game or mode",
    autocomplete: "off",
    spellcheck: "false",
  });
  #count = el("span", { class: "muted", "data-testid": "agent-count" });
  #body = el("tbody");
  #empty = el("p", { class: "empty" }, "No agent has been asked for a move yet.");
  #scroll;
  #panel;
  #histogram = new Histogram();
  #selected = null;
  #selectedName = el("h3", { class: "name", "data-testid": "selected-agent" });
  #selectedFacts = el("p", { class: "muted" });
  #histogramAt = -Infinity;
  #stale = new Set();
  #updatedAt = -Infinity;
  #sortedAt = -Infinity;
  #timer = null;

  constructor(root, page) {
    this.#page = page;
    this.#headings = COLUMNS.map((column, index) => this.#heading(column, index));
    const table = el(
      "table",
      { class: "agents", "data-testid": "agents-table" },
      el("caption", { class: "unseen" }, "Agents and the latency of their moves"),
      this.#columnWidths(),
      this.#head(),
      this.#body,
    );
    this.#scroll = el(
      "div",
      { class: "scroll table-frame", tabindex: "0", role: "region", "aria-label": "Table of agents" },
      table,
    );
    const field = el(
      "label",
      { class: "field", for: "agent-filter" },
      el("span", {}, "Filter"),
      this.#filter,
    );
    this.#panel = el(
      "section",
      { class: "panel agent-panel", "aria-label": "Selected agent" },
      el("div", { class: "agent-facts" }, this.#selectedName, this.#selectedFacts),
      this.#histogram.element,
    );
    root.append(
      el("div", { class: "bar" }, el("h2", {}, "Agents"), this.#count, field),
      this.#empty,
      this.#scroll,
      this.#panel,
    );
    this.#filter.addEventListener("input", () => this.#arrange());
    this.#body.addEventListener("keydown", (event) => this.#moveFocus(event));
    setHidden(this.#panel, true);
  }

  update(changes) {
    if (changes.isFull) {
      this.#forgetMissing();
      this.#sortedAt = -Infinity;
    }
    for (const key of changes.agents) this.#stale.add(key);
    const wait = this.#updatedAt + UPDATE_MS - performance.now();
    if (wait <= 0 || changes.isFull) this.#refresh();
    else this.#timer ??= setTimeout(() => this.#refresh(), wait);
  }

  paint() {
    this.#histogram.paint(true);
  }

  #forgetMissing() {
    for (const [key, row] of this.#rows) {
      if (this.#page.state.agents.has(key)) continue;
      row.element.remove();
      this.#rows.delete(key);
      if (row === this.#selected) this.#selected = null;
    }
  }

  #refresh() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#updatedAt = performance.now();
    for (const key of this.#stale) {
      const agent = this.#page.state.agents.get(key);
      if (!agent) continue;
      if (!this.#rows.has(key)) this.#rows.set(key, new AgentRow(key, (row) => this.#select(row)));
      this.#rows.get(key).update(agent);
    }
    this.#stale.clear();
    if (this.#isSortDue()) this.#arrange();
    if (!this.#selected && this.#order.length) this.#select(this.#order[0]);
    this.#refreshSelected();
  }

  /** Rows that keep changing places cannot be read: seldom, and never under the pointer. */
  #isSortDue() {
    if (this.#order.length === 0) return true;
    return performance.now() - this.#sortedAt > SORT_MS && !this.#body.matches(":hover, :focus-within");
  }

  /** Filters and sorts; rows move only when the order differs from the one on the page. */
  #arrange() {
    this.#sortedAt = performance.now();
    const wish = this.#filter.value.trim().toLowerCase();
    const { value } = COLUMNS[this.#sort.index];
    const { direction } = this.#sort;
    const fits = ({ agent }) =>
      [agent.name, agent.game, words(agent.mode)].some((text) => text.toLowerCase().includes(wish));
    const rows = [...this.#rows.values()].filter(fits);
    rows.sort((a, b) => compare(value(a.agent), value(b.agent), direction) || compare(a.key, b.key, 1));
    if (rows.length !== this.#order.length || rows.some((row, index) => row !== this.#order[index])) {
      const focused = document.activeElement;
      this.#body.replaceChildren(...rows.map(({ element }) => element));
      if (this.#body.contains(focused) && document.activeElement !== focused)
        focused.focus({ preventScroll: true });
    }
    this.#order = rows;
    const all = this.#rows.size;
    setText(this.#count, rows.length === all ? whole(all) : `${whole(rows.length)} of ${whole(all)}`);
    setHidden(this.#empty, all > 0);
    setHidden(this.#scroll, all === 0);
  }

  #columnWidths() {
    return el("colgroup", {}, ...COLUMNS.map(({ id }) => el("col", { class: `column-${id}` })));
  }

  #head() {
    const groups = [];
    for (const { group } of COLUMNS) {
      if (group && groups.at(-1)?.group === group) groups.at(-1).span += 1;
      else groups.push({ group, span: 1 });
    }
    const top = groups.map(({ group, span }) =>
      group ? el("th", { scope: "colgroup", colspan: span }, group) : el("td"),
    );
    return el("thead", {}, el("tr", { class: "groups" }, ...top), el("tr", {}, ...this.#headings));
  }

  #heading(column, index) {
    const button = el("button", { type: "button" }, column.title);
    button.addEventListener("click", () => this.#sortBy(index));
    const isSorted = index === this.#sort.index;
    return el(
      "th",
      {
        scope: "col",
        class: TEXT_COLUMNS.has(column.id) ? "text" : "number",
        "aria-sort": isSorted ? "descending" : "none",
        "data-testid": `sort-${column.id}`,
      },
      button,
    );
  }

  #sortBy(index) {
    const isText = TEXT_COLUMNS.has(COLUMNS[index].id);
    const isAgain = index === this.#sort.index;
    this.#sort = { index, direction: isAgain ? -this.#sort.direction : isText ? 1 : -1 };
    for (const [other, heading] of this.#headings.entries()) {
      setAttribute(
        heading,
        "aria-sort",
        other !== index ? "none" : this.#sort.direction > 0 ? "ascending" : "descending",
      );
    }
    this.#arrange();
  }

  #moveFocus(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const index = this.#order.findIndex(({ button }) => button === document.activeElement);
    if (!step || index < 0) return;
    event.preventDefault();
    this.#order[index + step]?.button.focus();
  }

  #select(row) {
    for (const other of [this.#selected, row]) {
      other?.element.setAttribute("aria-current", String(other === row));
      other?.button.setAttribute("aria-pressed", String(other === row));
    }
    this.#selected = row;
    this.#histogramAt = -Infinity;
    setHidden(this.#panel, false);
    this.#refreshSelected();
  }

  #refreshSelected() {
    const agent = this.#selected?.agent;
    if (!agent) return;
    setText(this.#selectedName, agent.name);
    const faults = tally(agent.faults) || "no failures";
    setText(
      this.#selectedFacts,
      `${agent.game} · ${words(agent.mode)} · ${whole(agent.moves)} moves · ${faults}`,
    );
    if (performance.now() - this.#histogramAt < HISTOGRAM_MS - 100) return;
    this.#histogramAt = performance.now();
    const key = agentKey(agent);
    this.#page.source.histogram(agent.name, agent.game).then(
      (histogram) => {
        if (this.#selected?.key === key) this.#histogram.setData(histogram, this.#page.state.run?.slo_ms);
      },
      () => undefined, // the page shows that the connection is gone
    );
  }
}
