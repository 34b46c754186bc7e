/** Finished matches: a table to filter and sort, page by page. */

import { choicesOf, el, labelledSelect, scrollHint, setAttribute, setHidden, setText } from "./dom.js";
import { outcome, rounded, whole, words } from "./text.js";

const RESULTS_A_PAGE = 50;
const RESULTS_MS = 2000;

/** The address of a match; null where this page does not hold its moves. */
export function matchLink(id, source) {
  return source.holds(id) ? `#match=${encodeURIComponent(id)}` : null;
}

/** "38–41.5 points" where the game counts them. */
export function pointsText(scores) {
  return scores ? `${rounded(scores[0])}–${rounded(scores[1])} points` : "";
}

/** Two buttons and a text to leaf through pages. */
export class Pager {
  #text = el("span", { class: "muted" });
  #before;
  #after;

  constructor(name, before, after, choose) {
    this.#before = el("button", { type: "button" }, before);
    this.#after = el("button", { type: "button" }, after);
    this.#before.addEventListener("click", () => choose(-1));
    this.#after.addEventListener("click", () => choose(1));
    this.element = el(
      "div",
      { class: "pager", role: "group", "aria-label": name },
      this.#before,
      this.#text,
      this.#after,
    );
  }

  update(page, pages, text) {
    this.#before.disabled = page <= 0;
    this.#after.disabled = page >= pages - 1;
    setText(this.#text, text);
    setHidden(this.element, pages <= 1);
  }
}

const RESULT_COLUMNS = [
  { sort: "players", title: "Match", isText: true },
  { sort: "result", title: "Result" },
  { sort: "how", title: "How it ended", isText: true },
  { sort: "game", title: "Game", isText: true },
  { sort: "plies", title: "Plies" },
  { sort: null, title: "Opening" },
];
const WINNERS = [
  ["", "all"],
  ["first", "1–0"],
  ["second", "0–1"],
  ["draw", "½–½"],
  ["won", "player won"],
  ["lost", "player lost"],
];
const OF_A_PLAYER = ["won", "lost"];
const ENDED = { sort: "ended", order: "descending" };

/** "forfeit: illegal" for a failure at the protocol, else the termination; what counts in no rating
says so. */
function howText({ termination, fault, is_rated: isRated }) {
  const how = fault && fault !== termination ? `${words(termination)}: ${words(fault)}` : words(termination);
  return isRated ? how : `${how} (not rated)`;
}

export class Results {
  /** The last answer is missing: it was not asked for yet, or did not come. */
  isStale = true;
  #page;
  #offset = 0;
  #total = 0;
  #asked = 0;
  #askedAt = -Infinity;
  #timer = null;
  #order = ENDED;
  #body = el("tbody");
  #empty = el("p", { class: "empty", hidden: "", "data-testid": "no-results" });
  #count = el("span", { class: "muted", "data-testid": "result-count" });
  #frame;
  #headings;
  #filters = new Map([
    ["player", labelledSelect("Player", [["", "all"]])],
    ["result", labelledSelect("Result", WINNERS)],
    ["how", labelledSelect("Ending", [["", "all"]])],
    ["game", labelledSelect("Game", [["", "all"]])],
  ]);
  #pager = new Pager("Pages of finished matches", "Previous", "Next", (step) => this.#turn(step));

  constructor(page) {
    this.#page = page;
    this.#headings = RESULT_COLUMNS.map((column) => this.#heading(column));
    const table = el(
      "table",
      { class: "results", "data-testid": "results" },
      el("caption", { class: "unseen" }, "Finished matches"),
      el("thead", {}, el("tr", {}, ...this.#headings)),
      this.#body,
    );
    this.#frame = el(
      "div",
      { class: "scroll frame", tabindex: "0", role: "region", "aria-label": "Table of finished matches" },
      table,
    );
    const filters = el("div", { class: "filters", role: "group", "aria-label": "Filter finished matches" });
    for (const [name, { label, select }] of this.#filters) {
      setAttribute(select, "data-testid", `results-${name}`);
      select.addEventListener("change", () => this.#wishAnew());
      filters.append(label);
    }
    this.#allowWinners();
    this.element = el(
      "section",
      { "aria-label": "Finished matches" },
      el("div", { class: "bar" }, el("h2", {}, "Finished"), this.#count, filters, this.#pager.element),
      this.#empty,
      scrollHint(this.#frame),
      this.#frame,
    );
  }

  /** Asks the source again, at most every two seconds; at once when it will soon answer no more. */
  refresh(isLast) {
    const wait = isLast ? 0 : this.#askedAt + RESULTS_MS - performance.now();
    if (wait > 0) {
      this.#timer ??= setTimeout(() => this.#ask(), wait);
    } else {
      this.#ask();
    }
  }

  #heading({ sort, title, isText }) {
    const attributes = { scope: "col", class: sort === "plies" ? "number" : "text" };
    if (!sort) return el("th", attributes, title);
    const button = el("button", { type: "button" }, title);
    button.addEventListener("click", () => this.#sortBy(sort, isText ? "ascending" : "descending"));
    return el("th", { ...attributes, "aria-sort": "none", "data-testid": `results-by-${sort}` }, button);
  }

  /** First in the column's usual order, then turned, then as the games ended. */
  #sortBy(sort, usual) {
    if (this.#order.sort !== sort) this.#order = { sort, order: usual };
    else if (this.#order.order !== usual) this.#order = ENDED;
    else this.#order = { sort, order: usual === "ascending" ? "descending" : "ascending" };
    for (const [index, column] of RESULT_COLUMNS.entries()) {
      if (column.sort)
        setAttribute(
          this.#headings[index],
          "aria-sort",
          column.sort === this.#order.sort ? this.#order.order : "none",
        );
    }
    this.#wishAnew();
  }

  #wishAnew() {
    this.#allowWinners();
    this.#offset = 0;
    this.#ask();
  }

  /** Only of a player can it be said that it won. */
  #allowWinners() {
    const { select } = this.#filters.get("result");
    const isPlayer = this.#filters.get("player").select.value !== "";
    for (const option of select.options) option.disabled = !isPlayer && OF_A_PLAYER.includes(option.value);
    if (!isPlayer && OF_A_PLAYER.includes(select.value)) select.value = "";
  }

  #turn(step) {
    this.#offset = Math.max(0, this.#offset + step * RESULTS_A_PAGE);
    this.#ask();
  }

  #wish() {
    const chosen = [...this.#filters].map(([name, { select }]) => [name, select.value]);
    return { ...Object.fromEntries(chosen), ...this.#order };
  }

  async #ask() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#askedAt = performance.now();
    this.isStale = false;
    this.#asked += 1;
    const [asked, offset] = [this.#asked, this.#offset];
    const answer = await this.#page.source.results(offset, RESULTS_A_PAGE, this.#wish()).catch(() => null);
    if (asked !== this.#asked) return;
    this.isStale = answer === null;
    if (!this.isStale) this.#show(answer, offset);
  }

  #show(answer, offset) {
    this.#total = answer.total;
    choicesOf(this.#filters.get("player").select, answer.players);
    choicesOf(this.#filters.get("game").select, answer.games);
    choicesOf(this.#filters.get("how").select, answer.hows, words);
    this.#body.replaceChildren(...answer.results.map((result) => this.#row(result)));
    const isAny = answer.players.length > 0;
    setText(
      this.#empty,
      isAny ? "No finished match fits the filter." : "No match has finished yet.",
    );
    setHidden(this.#empty, this.#total > 0);
    setHidden(this.#frame, this.#total === 0);
    setText(this.#count, isAny ? whole(this.#total) : "");
    const last = Math.min(this.#total, offset + RESULTS_A_PAGE);
    const pages = Math.ceil(this.#total / RESULTS_A_PAGE);
    this.#pager.update(
      offset / RESULTS_A_PAGE,
      pages,
      `${whole(offset + 1)}–${whole(last)} of ${whole(this.#total)}`,
    );
  }

  #row(result) {
    const winner = result.winner === null ? null : result.winner === result.first ? 0 : 1;
    const { score } = outcome(result.first, result.second, winner);
    const names = [result.first, result.second].map((name, side) =>
      el("span", { class: side === winner ? "name won" : "name" }, name),
    );
    const href = matchLink(result.match, this.#page.source);
    const link = el(
      "a",
      { href, title: href ? null : "Its moves are in the run's folder alone" },
      names[0],
      el("span", { class: "muted" }, " v "),
      names[1],
    );
    const points = pointsText(result.scores);
    const how = el("td", { class: "text how" }, howText(result));
    if (result.detail) how.title = result.detail;
    if (result.detail && result.fault) how.append(el("span", { class: "name detail" }, result.detail));
    return el(
      "tr",
      { "data-testid": "result" },
      el("th", { scope: "row", class: "text" }, link),
      el("td", { class: "text" }, points ? `${score} · ${points}` : score),
      how,
      el("td", { class: "text" }, result.game),
      el("td", { class: "number" }, whole(result.plies)),
      el("td", { class: "text" }, result.opening || "start"),
    );
  }
}
