/** The matches: a grid of live boards, and below it the finished ones. */

import { Board } from "./boards.js";
import { el, labelledSelect, setAttribute, setHidden, setText } from "./dom.js";
import { Pager, Results, matchLink } from "./results.js";
import { GRID } from "./source.js";
import { isKnown, outcome, rounded, shortTime, whole, words } from "./text.js";

/** The game with its rule set, where that needs saying. */
function gameName(board) {
  return board.label ?? board.game;
}

/** A player's line beside a board: whose turn, the name, clock or thinking time. */
export class PlayerLine {
  #turn = el("span", { class: "turn", "aria-hidden": "true" });
  #name = el("span", { class: "name" });
  #time = el("span", { class: "time" });
  #title = null;

  constructor() {
    this.element = el("span", { class: "player" }, this.#turn, this.#name, this.#time);
  }

  /** `mark` is "●" for the side to move, a result, or empty. */
  update(name, mark, time) {
    setText(this.#turn, mark);
    setText(this.#time, time);
    if (name === this.#title) return;
    this.#title = name;
    this.#name.textContent = name;
    this.#name.title = name;
  }
}

/** What a side's line says: [mark, time], and of a finished match [result, points]. */
export function playerTexts(board, side, now) {
  if (board.state === "finished")
    return [
      outcome("", "", board.winner).score.split("–")[side],
      board.scores ? rounded(board.scores[side]) : "",
    ];
  const isTurn = board.side === side && board.state === "running";
  const left = board.clock_left_s?.[side];
  if (isKnown(left)) return [isTurn ? "●" : "", shortTime(left)];
  const since = board.thinking_since_s;
  const time = isTurn && isKnown(since) && isKnown(now) ? shortTime(Math.max(now - since, 0)) : "";
  return [isTurn ? "●" : "", time];
}

const STATES = new Map([
  ["running", ""],
  ["suspended", "Suspended"],
  ["scheduled", "Not begun"],
  ["finished", ""],
]);

/** One board of the grid: a link to its match. */
class Card {
  #page;
  #players = [new PlayerLine(), new PlayerLine()];
  #board;
  #state = el("span", { class: "board-state" });
  #caption = el("span");
  #move = el("span", { class: "card-move" });
  #link;
  #isStale = true;
  isSeen = false;

  constructor(board, page) {
    this.#page = page;
    this.#board = new Board(page.drawings.drawing(board.game));
    const label = `Match ${board.number}, ${gameName(board)}: ${board.first} v ${board.second}`;
    const frame = el("span", { class: "board-frame" }, this.#board.element, this.#state);
    const caption = el("span", { class: "card-caption" }, this.#caption, this.#move);
    this.#link = el(
      "a",
      { href: matchLink(board.match, page.source), "aria-label": label },
      this.#players[1].element,
      frame,
      this.#players[0].element,
      caption,
    );
    this.element = el("li", { class: "card", "data-testid": "card" }, this.#link);
    this.set(board);
  }

  set(board) {
    this.data = board;
    this.#isStale = true;
  }

  focus() {
    this.#link.focus();
  }

  /** Brings the picture up to date; call it for cards in view. */
  draw(now) {
    const board = this.data;
    const names = [board.first, board.second];
    for (const side of [0, 1]) this.#players[side].update(names[side], ...playerTexts(board, side, now));
    if (!this.#isStale) return;
    this.#isStale = false;
    this.#board.show(board.fen, board.move);
    setAttribute(this.element, "data-state", STATES.has(board.state) ? board.state : "running");
    setText(this.#state, STATES.get(board.state) ?? "");
    const isOver = board.state === "finished";
    setText(this.#caption, `#${board.number} ${gameName(board)}`);
    const last = board.notation ?? board.move;
    setText(
      this.#move,
      isOver ? words(board.termination) : [`ply ${board.ply}`, last].filter(Boolean).join(" · "),
    );
    if (board.detail) setAttribute(this.#caption, "title", board.detail);
  }
}

/** The boards of one page, each in a place that it keeps while it lasts. */
class Grid {
  #page;
  #cards = new Map();
  #nodes = new WeakMap();
  #seen;
  element = el("ul", { class: "grid", "data-testid": "grid" });

  constructor(page) {
    this.#page = page;
    this.#seen = new IntersectionObserver((entries) => this.#notice(entries), { rootMargin: "100px" });
  }

  get size() {
    return this.#cards.size;
  }

  games() {
    return [...new Set([...this.#cards.values()].map(({ data }) => gameName(data)))].sort();
  }

  focus(id) {
    this.#cards.get(id)?.focus();
  }

  update(changes) {
    const { boards, fleet } = this.#page.state;
    const ids = changes.isFull ? new Set([...this.#cards.keys(), ...boards.keys()]) : changes.boards;
    const places = [];
    for (const id of ids)
      if (!boards.has(id) && this.#cards.has(id)) places.push(this.#cards.get(id).element);
    for (const id of ids) if (boards.has(id)) this.#set(boards.get(id), places);
    for (const id of ids) if (!boards.has(id)) this.#remove(id);
    for (const card of this.#cards.values()) if (card.isSeen) card.draw(fleet?.now_s);
  }

  /** Shows the cards that fit; returns how many. */
  filter(fits) {
    let shown = 0;
    for (const card of this.#cards.values()) {
      const isShown = fits(card.data);
      setHidden(card.element, !isShown);
      shown += Number(isShown);
    }
    return shown;
  }

  #set(board, places) {
    const known = this.#cards.get(board.match);
    if (known) {
      known.set(board);
      return;
    }
    const card = new Card(board, this.#page);
    this.#cards.set(board.match, card);
    this.#nodes.set(card.element, card);
    this.#seen.observe(card.element);
    const place = places.shift();
    if (place) place.before(card.element);
    else this.element.append(card.element);
  }

  #remove(id) {
    const card = this.#cards.get(id);
    if (!card) return;
    this.#seen.unobserve(card.element);
    card.element.remove();
    this.#cards.delete(id);
  }

  #notice(entries) {
    for (const { target, isIntersecting } of entries) {
      const card = this.#nodes.get(target);
      card.isSeen = isIntersecting;
      if (isIntersecting) card.draw(this.#page.state.fleet?.now_s);
    }
  }
}

export class MatchesView {
  #page;
  #grid;
  #results;
  #bar = el("div", { class: "bar" });
  #games = labelledSelect("Game", [["", "all"]], { id: "game-filter" });
  #knownGames = "";
  #name = el("input", {
    type: "search",
    id: "board-filter",
    placeholder: "agent",
    autocomplete: "off",
    spellcheck: "false",
  });
  #count = el("span", { class: "muted", "data-testid": "board-count" });
  #empty = el("p", { class: "empty", "data-testid": "no-boards" });
  #pager = new Pager("Pages of boards", "Previous", "Next", (step) => this.#turn(step));

  constructor(root, page) {
    this.#page = page;
    this.#grid = new Grid(page);
    this.#results = new Results(page);
    const field = el("label", { class: "field", for: "board-filter" }, el("span", {}, "Agent"), this.#name);
    this.#bar.append(
      el("h2", {}, page.source.isStatic ? "Games to step through" : "Boards"),
      this.#count,
      this.#games.label,
      field,
      this.#pager.element,
    );
    const boards = [this.#bar, this.#empty, this.#grid.element];
    const finished = this.#results.element;
    root.append(...(page.source.isStatic ? [finished, ...boards] : [...boards, finished]));
    this.#name.addEventListener("input", () => this.#filter());
    this.#games.select.addEventListener("change", () => this.#filter());
  }

  show() {
    this.#bar.append(this.#page.labelChoice);
  }

  update(changes) {
    const { state } = this.#page;
    if (!this.#page.isReady || !state.fleet) return;
    this.#grid.update(changes);
    this.#offerGames();
    this.#filter();
    const { page, pages } = state.pages;
    this.#pager.update(page, pages, `page ${page + 1} of ${pages}`);
    if (changes.hasResults || this.#results.isStale || state.isEnded) this.#results.refresh(state.isEnded);
  }

  /** Puts the focus on the match that was open before. */
  focus(id) {
    this.#grid.focus(id);
  }

  #turn(step) {
    this.#page.source.setPage(this.#page.state.pages.page + step);
  }

  #offerGames() {
    const games = this.#grid.games();
    const text = JSON.stringify(games);
    if (text === this.#knownGames) return;
    this.#knownGames = text;
    const { select } = this.#games;
    const chosen = select.value;
    select.replaceChildren(
      el("option", { value: "" }, "all"),
      ...games.map((game) => el("option", { value: game }, game)),
    );
    select.value = games.includes(chosen) ? chosen : "";
  }

  #filter() {
    const wish = this.#name.value.trim().toLowerCase();
    const game = this.#games.select.value;
    const fits = (board) =>
      (!game || gameName(board) === game) &&
      [board.first, board.second].some((name) => name.toLowerCase().includes(wish));
    const shown = this.#grid.filter(fits);
    setText(this.#count, this.#countText(shown));
    setHidden(this.#empty, shown > 0);
    if (shown === 0) setText(this.#empty, this.#emptyText());
  }

  /** "65–128 of 196", or "3 of the 64 on this page" where they are filtered. */
  #countText(shown) {
    const { page, pages, boards } = this.#page.state.pages;
    const { size } = this.#grid;
    if (pages > 1 && shown < size) return `${whole(shown)} of the ${whole(size)} on this page`;
    if (pages > 1) return `${whole(page * GRID + 1)}–${whole(page * GRID + size)} of ${whole(boards)}`;
    return shown === boards ? whole(boards) : `${whole(shown)} of ${whole(boards)}`;
  }

  #emptyText() {
    if (this.#grid.size > 0) return "No board here fits the filter.";
    if (this.#page.source.isStatic) return "This report holds no games to step through.";
    const { isEnded, numLeft } = this.#page.state;
    if (!isEnded) return "No match has begun yet.";
    return numLeft > 0 ? "No match is being played now." : "Every match is over.";
  }
}
