/** The replicas of an engine side by side, and which of them lags behind. */

import { el, named, scrollHint, setHidden, setText } from "./dom.js";
import { isKnown, percent, rounded, tally, tenths, UNKNOWN, whole } from "./text.js";

function againstOthers({ median_ratio: ratio, is_straggler: isSlow }) {
  const times = isKnown(ratio) ? `${tenths(ratio)}×` : UNKNOWN;
  return isSlow ? `⚠ slow, ${times}` : times;
}

const REPLICA_COLUMNS = [
  ["p50 ÷ others'", againstOthers],
  ["Matches", (row) => whole(row.matches)],
  ["Share", (row) => percent(row.share)],
  ["Moves", (row) => whole(row.moves)],
  ["p50, ms", (row) => rounded(row.engine_ms?.p50)],
  ["p95, ms", (row) => rounded(row.engine_ms?.p95)],
  ["Prefix hits", (row) => percent(row.prefix_hit_rate)],
  ["Requests in a step", (row) => rounded(row.step_requests?.mean)],
  ["Faults", (row) => tally(row.faults) || "none"],
];

function movedText(count) {
  return `${whole(count)} ${count === 1 ? "match was" : "matches were"} answered by more than one.`;
}

export class ReplicaTable {
  #body = el("tbody");
  #note = el("p", { class: "muted" });
  #shown = null;

  constructor(engine) {
    const headings = ["Replica", ...REPLICA_COLUMNS.map(([name]) => name)];
    const table = el(
      "table",
      {},
      el("caption", { class: "unseen" }, `Replicas of ${engine}; times are the engine's for a move`),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          ...headings.map((name, index) => el("th", { scope: "col", class: index ? "number" : "text" }, name)),
        ),
      ),
      this.#body,
    );
    const scroll = el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table of replicas of ${engine}` },
      table,
    );
    this.element = el(
      "section",
      { class: "replicas", "data-testid": "replicas", "aria-label": `Replicas of ${engine}` },
      el("h4", {}, "Replicas"),
      scrollHint(scroll),
      scroll,
      this.#note,
    );
    setHidden(this.element, true);
  }

  /** `replicas` is null where an engine has not several. */
  update(replicas) {
    setHidden(this.element, !replicas);
    if (!replicas) return;
    const told = JSON.stringify(replicas);
    if (told === this.#shown) return;
    this.#shown = told;
    this.#body.replaceChildren(...replicas.rows.map((row) => this.#row(row)));
    const { count, straggler_ratio: ratio, straggler_moves: moves } = replicas;
    const leftOut = count - replicas.rows.length;
    const more = leftOut ? `And ${whole(leftOut)} more, silent or with fewer moves. ` : "";
    setText(
      this.#note,
      `${more}${movedText(replicas.matches_moved)} Times are the engine's for a move. Slow: for like moves, of one ` +
        `agent at one game, a p50 of more than ${rounded(ratio)} times the median of the other replicas', each of ` +
        `${whole(moves)} moves or more.`,
    );
  }

  #row(row) {
    return el(
      "tr",
      { class: row.is_straggler ? "straggler" : null, "data-testid": "replica" },
      el("th", { scope: "row", class: "text" }, named(row.replica)),
      ...REPLICA_COLUMNS.map(([, text]) => el("td", { class: "number" }, text(row))),
    );
  }
}
