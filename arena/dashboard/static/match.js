/** One match: a large board to step through, its moves with where their time went, and attempts. */

import { Board } from "./boards.js";
import { el, named, setAttribute, setHidden, setText } from "./dom.js";
import { PlayerLine, playerTexts } from "./matches.js";
import { pointsText } from "./results.js";
import { isKnown, outcome, whole, words } from "./text.js";

const RELOAD_MS = 1000;
const POLL_MS = 2000;
const STEPS = ["queue", "prefill", "decode", "harness"];
const NOT_THE_PLAYERS = new Set(
  "overloaded transport stalled engine_dead rejected malformed cut_short constraint_ignored cancelled".split(
    " ",
  ),
);

/** A bar whose length is the latency and whose parts are the steps; `longest` fills it. */
function splitBar(ply, longest) {
  const bar = el("span", { class: "split", "aria-hidden": "true" });
  for (const step of STEPS) {
    const part = el("i", { class: `part ${step}` });
    part.style.width = `${(100 * Math.max(0, ply[`${step}_ms`] ?? 0)) / longest}%`;
    bar.append(part);
  }
  return bar;
}

/** As score sheets have it: (=) behind a move that came with an offer of a draw. */
function moveText({ notation, move, offers_draw: offersDraw }) {
  return `${notation ?? move}${offersDraw ? " (=)" : ""}`;
}

function attemptItem(attempt, index) {
  const verdict = attempt.fault ? words(attempt.fault) : attempt.is_thought ? "thought" : "accepted";
  const whose = NOT_THE_PLAYERS.has(attempt.fault) ? " (not the player's fault: asked again)" : "";
  const facts = [
    `${whole(attempt.prompt_tokens)} prompt tokens, ${whole(attempt.cached_tokens)} cached`,
    `${whole(attempt.completion_tokens)} out`,
    attempt.finish ? `ended by ${words(attempt.finish)}` : "",
  ];
  const item = el(
    "li",
    { class: attempt.fault ? "attempt failed" : "attempt", "data-testid": "attempt" },
    el(
      "p",
      { class: "attempt-head" },
      el("strong", {}, `${index + 1}. ${attempt.fault ? "✗" : "✓"} ${verdict}`),
      `${whose} · ${words(attempt.mode)}`,
    ),
  );
  if (attempt.detail) item.append(el("p", {}, attempt.detail));
  if (attempt.reasoning)
    item.append(
      el("pre", { tabindex: "0", "aria-label": "Reasoning of the model" }, attempt.reasoning),
    );
  if (attempt.reply_text)
    item.append(el("pre", { tabindex: "0", "aria-label": "Reply of the model" }, attempt.reply_text));
  item.append(el("p", { class: "muted" }, facts.filter(Boolean).join(" · ")));
  return item;
}

/** The list of moves. A committed ply never changes, but for the last: how long its commit took is
only known when the next one begins. So a row is made once, and the last once more. */
class MoveList {
  #rows = [];
  #body = el("tbody");
  #frame;
  #current = null;
  #longest = 1;
  #choose;

  constructor(choose) {
    this.#choose = choose;
    const headings = ["#", "Move", "ms", "", ...STEPS, ""].map((text, index) =>
      el("th", { scope: "col", class: index === 1 || index === 3 || index === 8 ? "text" : "number" }, text),
    );
    const table = el(
      "table",
      { class: "moves", "data-testid": "moves" },
      el("caption", { class: "unseen" }, "Moves, and the milliseconds of each step"),
      el("thead", {}, el("tr", {}, ...headings)),
      this.#body,
    );
    this.#frame = el(
      "div",
      { class: "scroll moves-frame", tabindex: "0", role: "region", "aria-label": "Moves" },
      table,
    );
    const keys = STEPS.map((step) =>
      el("span", { class: "key" }, el("i", { class: `swatch part ${step}`, "aria-hidden": "true" }), step),
    );
    this.element = el("div", { class: "move-list" }, el("div", { class: "keys" }, ...keys), this.#frame);
  }

  update(plies) {
    const longest = Math.max(1, ...plies.map((ply) => ply.latency_ms ?? 0));
    const isRescaled = longest > this.#longest;
    this.#longest = longest;
    if (isRescaled)
      for (const [index, { bar }] of this.#rows.entries())
        bar.replaceChildren(splitBar(plies[index], longest));
    if (plies.length > this.#rows.length) this.#rows.pop()?.row.remove();
    for (let index = this.#rows.length; index < plies.length; index += 1) this.#add(plies[index], index);
  }

  /** Marks the row of the move that led to the position shown; 0 is the start. */
  mark(ply) {
    const row = this.#rows[ply - 1]?.row ?? null;
    if (row === this.#current) return;
    this.#current?.removeAttribute("aria-current");
    row?.setAttribute("aria-current", "true");
    this.#current = row;
    const frame = this.#frame;
    if (!row) frame.scrollTop = 0;
    else if (row.offsetTop < frame.scrollTop + 40) frame.scrollTop = row.offsetTop - 40;
    else if (row.offsetTop + row.offsetHeight > frame.scrollTop + frame.clientHeight)
      frame.scrollTop = row.offsetTop + row.offsetHeight - frame.clientHeight;
  }

  #add(ply, index) {
    const button = el("button", { type: "button", class: "move" }, moveText(ply));
    const bar = el("td", { class: "text" }, splitBar(ply, this.#longest));
    const failed = ply.attempts.filter(({ fault }) => fault).length;
    const flags = [
      ply.late ? el("span", { class: "flag late" }, "late") : "",
      failed ? el("span", { class: "flag" }, `${failed} failed`) : "",
    ];
    const row = el(
      "tr",
      { "data-testid": "move", class: ply.side === 0 ? "side-first" : "side-second" },
      el("td", { class: "number muted" }, String(index + 1)),
      el("th", { scope: "row", class: "text" }, button),
      el("td", { class: "number total-ms" }, whole(ply.latency_ms)),
      bar,
      ...STEPS.map((step) => el("td", { class: "number" }, whole(ply[`${step}_ms`]))),
      el("td", { class: "text" }, ...flags),
    );
    row.addEventListener("click", () => this.#choose(index + 1));
    this.#rows.push({ row, bar });
    this.#body.append(row);
  }
}

const BUTTONS = [
  ["first", "«", "First position"],
  ["previous", "‹", "Previous move"],
  ["next", "›", "Next move"],
  ["last", "»", "Last position"],
];
const KEYS = new Map([
  ["Home", "first"],
  ["ArrowLeft", "previous"],
  ["ArrowRight", "next"],
  ["End", "last"],
]);

export class MatchView {
  #page;
  #root;
  #id = null;
  #detail = null;
  #ply = 0;
  #isFollowing = true;
  #loadedAt = -Infinity;
  #timer = null;
  #parts = null;

  constructor(root, page) {
    this.#page = page;
    this.#root = root;
    document.addEventListener("keydown", (event) => this.#key(event));
  }

  show(id) {
    if (id !== this.#id) {
      this.#id = id;
      this.#detail = null;
      this.#parts = null;
      this.#ply = 0;
      this.#isFollowing = !this.#page.source.isStatic;
      this.#say("Loading the match…");
    }
    if (this.#parts) this.#offerLabels(this.#parts.bar, this.#detail.game);
    this.#load();
  }

  hide() {
    this.#forgetReload();
  }

  update(changes) {
    if (!this.#page.isReady || this.#page.source.isStatic) return;
    if (this.#parts && this.#detail) this.#showPlayers();
    if (this.#detail?.state === "finished" && !changes.isFull) return;
    const isOnPage = this.#page.state.boards.has(this.#id);
    if (this.#page.state.isEnded) this.#load();
    else if (changes.isFull || changes.boards.has(this.#id)) this.#reload(RELOAD_MS);
    else if (!isOnPage) this.#reload(POLL_MS);
  }

  #reload(interval) {
    const wait = this.#loadedAt + interval - performance.now();
    if (wait <= 0) this.#load();
    else this.#timer ??= setTimeout(() => this.#load(), wait);
  }

  #forgetReload() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }

  async #load() {
    this.#forgetReload();
    if (!this.#page.isReady) return;
    this.#loadedAt = performance.now();
    const id = this.#id;
    const detail = await this.#page.source.match(id).catch(() => undefined);
    if (id !== this.#id) return;
    if (detail) this.#show(detail);
    else if (!this.#detail) this.#say(this.#missing(detail));
  }

  #missing(detail) {
    if (detail === undefined) return "The arena does not answer; this page keeps trying.";
    return this.#page.source.isStatic
      ? "The moves of this match are not kept in this report."
      : "The arena knows no such match.";
  }

  #say(text) {
    this.#root.replaceChildren(
      this.#back(),
      el("p", { class: "empty", "data-testid": "match-message" }, text),
    );
  }

  #back() {
    return el("a", { href: "#matches", class: "back" }, "← Matches");
  }

  #show(detail) {
    this.#detail = detail;
    this.#parts ??= this.#build(detail);
    const { list, follow } = this.#parts;
    list.update(detail.plies);
    const isOver = detail.state === "finished";
    if (isOver && this.#isFollowing && this.#page.source.isStatic) this.#isFollowing = false;
    setHidden(follow, isOver);
    this.#showState();
    this.#go(this.#isFollowing ? detail.plies.length : this.#ply, this.#isFollowing);
  }

  #build(detail) {
    const parts = {
      board: new Board(this.#page.drawings.drawing(detail.game)),
      players: [new PlayerLine(), new PlayerLine()],
      state: el("p", { class: "match-state", "data-testid": "match-state" }),
      position: el("p", { class: "muted position", "data-testid": "position" }),
      controls: this.#controls(),
      follow: el(
        "button",
        { type: "button", "aria-pressed": "true", "data-testid": "follow" },
        "Follow live",
      ),
      list: new MoveList((ply) => this.#go(ply, false)),
      attempts: el("section", {
        class: "panel attempts",
        "data-testid": "attempts",
        "aria-label": "Attempts",
      }),
      bar: el("div", { class: "bar" }),
    };
    parts.follow.addEventListener("click", () => this.#go(this.#detail.plies.length, !this.#isFollowing));
    const title = el(
      "h2",
      { tabindex: "-1", class: "match-title" },
      `#${detail.number} `,
      named(detail.first),
      el("span", { class: "muted" }, " v "),
      named(detail.second),
    );
    const facts = [...new Set([detail.label ?? detail.game, detail.opening])].filter(Boolean);
    parts.bar.append(el("p", { class: "muted" }, facts.join(" · ")));
    this.#offerLabels(parts.bar, detail.game);
    parts.frame = el("div", { class: "board-frame large" }, parts.board.element);
    const controls = el(
      "div",
      { class: "controls", role: "group", "aria-label": "Step through the match" },
      ...parts.controls.values(),
      parts.follow,
    );
    const left = el(
      "div",
      { class: "match-board" },
      parts.players[1].element,
      parts.frame,
      parts.players[0].element,
      parts.position,
      controls,
      parts.attempts,
    );
    this.#root.replaceChildren(
      this.#back(),
      title,
      parts.bar,
      parts.state,
      el("div", { class: "match" }, left, parts.list.element),
    );
    title.focus({ preventScroll: true });
    return parts;
  }

  #offerLabels(bar, game) {
    if (this.#page.drawings.drawing(game)?.labels.length > 1) bar.append(this.#page.labelChoice);
  }

  #controls() {
    return new Map(
      BUTTONS.map(([id, sign, name]) => {
        const button = el(
          "button",
          { type: "button", "aria-label": name, title: name, "data-testid": `step-${id}` },
          sign,
        );
        button.addEventListener("click", () => this.#step(id));
        return [id, button];
      }),
    );
  }

  #key(event) {
    const step = KEYS.get(event.key);
    const isTyping = event.target instanceof Element && event.target.matches("input, select, textarea");
    if (
      !step ||
      isTyping ||
      this.#root.hidden ||
      !this.#detail ||
      event.altKey ||
      event.ctrlKey ||
      event.metaKey
    )
      return;
    event.preventDefault();
    this.#step(step);
  }

  #step(step) {
    const last = this.#detail.plies.length;
    const ply = { first: 0, previous: this.#ply - 1, next: this.#ply + 1, last }[step];
    this.#go(ply, step === "last" && this.#detail.state !== "finished" && !this.#page.source.isStatic);
  }

  /** Shows the position after `ply` moves; following goes on with each new move. */
  #go(ply, isFollowing) {
    const { plies, start_fen: start, game } = this.#detail;
    const { board, controls, follow, frame, list, position } = this.#parts;
    frame.classList.toggle("still", Math.abs(ply - this.#ply) > 1);
    this.#ply = Math.min(plies.length, Math.max(0, ply));
    this.#isFollowing = isFollowing;
    const shown = plies[this.#ply - 1];
    board.show(shown?.fen ?? start, shown?.move ?? null);
    list.mark(this.#ply);
    for (const id of ["first", "previous"]) controls.get(id).disabled = this.#ply === 0;
    for (const id of ["next", "last"]) controls.get(id).disabled = this.#ply === plies.length;
    setAttribute(follow, "aria-pressed", String(isFollowing));
    const mover = shown ? this.#page.drawings.sideNames(game)[shown.side] : "";
    const move = shown ? `${mover} ${moveText(shown)}` : "start";
    setText(position, `Position ${this.#ply} of ${plies.length}: ${move}`);
    this.#showPlayers();
    this.#showAttempts(shown);
  }

  #showPlayers() {
    const { players } = this.#parts;
    const detail = this.#detail;
    const sides = this.#page.drawings.sideNames(detail.game);
    const live = this.#page.state.boards.get(this.#id);
    const board = live && live.ply >= detail.plies.length ? live : detail;
    for (const side of [0, 1]) {
      const name = `${side === 0 ? detail.first : detail.second} (${sides[side]})`;
      players[side].update(name, ...playerTexts(board, side, this.#page.state.fleet?.now_s));
    }
  }

  #showState() {
    const { state, winner, termination, detail, scores, first, second } = this.#detail;
    const { won, score } = outcome(first, second, winner);
    const reason = detail ?? "its engine is away";
    let text = state === "suspended" ? `Suspended, the clocks stand still: ${reason}.` : "";
    if (state === "scheduled") text = "Not begun yet.";
    if (state === "finished") {
      text = [
        `${score} ${won === null ? "drawn" : `${won} won`}, ${words(termination)}`,
        pointsText(scores),
        detail,
      ]
        .filter(Boolean)
        .join(" · ");
    }
    setText(this.#parts.state, text);
    setHidden(this.#parts.state, text === "");
  }

  #showAttempts(ply) {
    const { attempts } = this.#parts;
    const { pending } = this.#detail;
    const isLast = this.#ply === this.#detail.plies.length;
    const shown = [ply?.attempts ?? [], isLast ? (pending ?? []) : []];
    const text = JSON.stringify([this.#ply, shown]);
    if (attempts.dataset.shown === text) return;
    attempts.dataset.shown = text;
    const [made, open] = shown;
    const late = ply?.late ? ", late" : "";
    const time = isKnown(ply?.latency_ms) ? ` · ${whole(ply.latency_ms)} ms${late}` : "";
    attempts.replaceChildren();
    if (ply)
      attempts.append(
        el("h3", {}, `Move ${this.#ply}: ${moveText(ply)}${time}`),
        el("ol", {}, ...made.map(attemptItem)),
      );
    if (open.length)
      attempts.append(
        el("h3", {}, this.#detail.state === "finished" ? "The answers that ended it" : "The move under way"),
        el("ol", {}, ...open.map(attemptItem)),
      );
    setHidden(attempts, !ply && open.length === 0);
  }
}
