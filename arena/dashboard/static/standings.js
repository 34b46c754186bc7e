/** The standings of each game: points and ratings, who beat whom, and how sure that is. */

import { choiceButtons, el, named, scrollHint, setHidden, setText } from "./dom.js";
import { matchLink } from "./results.js";
import { isKnown, percent, tally, whole, words } from "./text.js";

const STANDINGS_MS = 5000;
const MOST_NUMBERS = 20;
const MOST_BESIDE = 5;
const MOST_NAMED = 8;
const MOST_UNRATED = 50;
const ELO_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
/** How far apart the texts of two ticks are on a telephone, as a share of the axis; "0" is short. */
const APART = 0.37;
const APART_FROM_ZERO = 0.25;
const DEEPEST = 50;
const DEEPEST_BARE = 85;

function signed(value) {
  if (!isKnown(value)) return "–";
  const text = whole(Math.abs(value));
  return text === "0" ? "0" : `${value < 0 ? "−" : "+"}${text}`;
}

function points(value) {
  return Number.isInteger(value) ? whole(value) : `${value < 1 ? "" : whole(Math.floor(value))}½`;
}

function hundredths(value) {
  return isKnown(value) ? String(Math.round(value * 100) / 100) : "";
}

function plural(number, one) {
  return `${whole(number)} ${number === 1 ? one : `${one}s`}`;
}

function withError(value, error) {
  return isKnown(value) ? `${signed(value)} ±${whole(error)}` : "–";
}

/** An end of null is no bound. */
function eloRange({ value, low, high }) {
  const from = low === null ? "no lower bound" : signed(low);
  const to = high === null ? "no upper bound" : signed(high);
  return `${signed(value)}, ${from} to ${to}`;
}

/** "a, b, c and 12 more", each name kept apart from the words around it. */
function nameList(names) {
  const shown = names.length > MOST_NAMED + 1 ? names.slice(0, MOST_NAMED) : names;
  const parts = shown.flatMap((name, index) => (index ? [", ", named(name)] : [named(name)]));
  if (shown.length < names.length) parts.push(` and ${whole(names.length - shown.length)} more`);
  return parts;
}

/** One game's tables out of those of all; players in the order of the table. */
class Table {
  constructor(data, game) {
    const ofGame = (row) => row.game === game;
    this.rows = data.standings.filter(ofGame);
    this.names = this.rows.map(({ name }) => name);
    this.pairings = data.pairings.filter(ofGame);
    this.ratings = data.ratings.find(ofGame);
    this.unrated = data.unrated.filter(ofGame);
    this.tests = data.sprt.filter(ofGame);
    this.nulls = data.null_pairings.filter(ofGame);
    this.byes = data.tournament.byes.filter(ofGame);
    this.ties = data.tournament.ties.filter(ofGame);
    this.winner = data.tournament.winners.find(ofGame)?.agent ?? null;
    this.pairs = new Map(this.names.map((name) => [name, 0]));
    this.met = new Map(this.names.map((name) => [name, new Map()]));
    for (const pairing of this.pairings) this.#take(pairing);
  }

  #take({ agent, opponent, wins, draws, losses, pairs, elo, los }) {
    const numPairs = Object.values(pairs).reduce((total, count) => total + count, 0);
    const games = wins + draws + losses;
    const turned = { value: -elo.value, low: -elo.high, high: -elo.low };
    const common = { draws, games, numPairs };
    this.met.get(agent).set(opponent, { ...common, wins, losses, elo, los });
    this.met.get(opponent).set(agent, {
      ...common,
      wins: losses,
      losses: wins,
      elo: turned,
      los: 1 - los,
    });
    for (const name of [agent, opponent]) this.pairs.set(name, this.pairs.get(name) + numPairs);
  }

  /** Whether without forfeited games ratings compare within other groups. */
  get partedSkill() {
    const { groups, skill_groups: skillGroups } = this.ratings;
    return skillGroups.length > 1 && JSON.stringify(groups) !== JSON.stringify(skillGroups);
  }

  /** The number of the group in which a player's rating compares; empty where there is one. */
  groupOf(name) {
    const { groups } = this.ratings;
    const at = groups.findIndex((group) => group.includes(name));
    return groups.length > 1 && at >= 0 ? String(at + 1) : "";
  }

  /** The chance that one is better than another, by the ratings; null where nothing is known. */
  los(one, two) {
    const { names, los } = this.ratings;
    return los[names.indexOf(one)]?.[names.indexOf(two)] ?? null;
  }
}

/** What a reader must know before believing the numbers, each a list of text and names. */
function notesOf(table, source) {
  const notes = table.winner === null ? [] : [[named(table.winner), " won the knock-out."]];
  const { advantage_elo: advantage, advantage_error: advantageError, failure } = table.ratings;
  const { is_penalised: isPenalised, anchor_fit: fit } = table.ratings;
  const rated = table.rows.filter(({ elo }) => isKnown(elo));
  const size = ({ name, elo_error: error }) => [
    named(name),
    ` (${plural(table.pairs.get(name), "pair")}: error ±${whole(error)})`,
  ];
  if (rated.length > 1) {
    const byError = [...rated].sort((a, b) => a.elo_error - b.elo_error);
    notes.push(["Surest: ", ...size(byError[0]), "; least sure: ", ...size(byError.at(-1)), "."]);
  }
  const { groups } = table.ratings;
  if (groups.length > 1) {
    const listed = groups.slice(0, MOST_NAMED).flatMap((group, index) => [
      `${index ? "; " : ""}${index + 1}. `,
      ...nameList(group),
    ]);
    const more = groups.length > MOST_NAMED ? ` and ${whole(groups.length - MOST_NAMED)} more` : "";
    notes.push([
      `No games link these ${whole(groups.length)} groups, so ratings compare within a group only: `,
      ...listed,
      `${more}.`,
    ]);
  }
  if (table.partedSkill) notes.push(["Forfeits part players whom games link: see the ratings without forfeits."]);
  if (isPenalised)
    notes.push([
      "These results alone would put ratings at infinity: somebody won or lost everything, or did with one side of the board. A penalty keeps them finite. " +
        "Of two players alone, go by their pairing.",
    ]);
  notes.push(...zeroNotes(table.rows));
  if (failure) notes.push([`Some or all ratings are missing: ${failure}.`]);
  if (fit && !fit.is_credible)
    notes.push([
      "The anchors do not fit the games (a chance below 0.1 %); ratings that hang on them mean nothing.",
    ]);
  notes.push(...table.tests.filter((test) => test.unrated_pairs).map(testNote));
  if (isKnown(advantage))
    notes.push([`Moving first is worth ${withError(advantage, advantageError)} Elo here (95 %).`]);
  if (table.unrated.length) notes.push(unratedNote(table.unrated, source));
  return notes;
}

/** Elo and skill have one zero where the same players have both, or anchors hold them. */
function zeroNotes(rows) {
  const skills = rows.map(({ skill_elo: skill }) => skill).filter(isKnown);
  const without = rows.filter(({ elo, skill_elo: skill }) => isKnown(elo) && !isKnown(skill));
  const total = skills.reduce((sum, skill) => sum + skill, 0);
  if (!without.length || !skills.length || Math.abs(total) >= 0.01 * skills.length) return [];
  return [
    [
      "No skill rating, for want of a game without a forfeit: ",
      ...nameList(without.map(({ name }) => name)),
      ". Skill is 0 at the mean of the others, so it is not to be compared with Elo.",
    ],
  ];
}

function testNote(test) {
  const { agent, opponent, unrated_pairs: left, decision, run_decision: all } = test;
  return [
    "The test of ",
    named(agent),
    " v ",
    named(opponent),
    ` leaves out ${plural(left, "pair")} with a game that is not rated`,
    all === decision ? "." : `; the run went by all pairs, which say: ${DECISIONS.get(all)(test)}.`,
  ];
}

function unratedNote(unrated, source) {
  const shown = unrated.slice(0, MOST_UNRATED);
  const links = shown.flatMap(({ match, number, first, second }, index) => [
    index ? ", " : "",
    el("a", { href: matchLink(match, source) }, `#${number} `, named(first), " v ", named(second)),
  ]);
  const more = unrated.length - shown.length;
  return [
    `${plural(unrated.length, "game")} not rated, for the engine was saturated when the flag fell; `,
    "they count in the points alone: ",
    ...links,
    more ? ` and ${whole(more)} more.` : ".",
  ];
}

const DECISIONS = new Map([
  ["accept", ({ elo1 }) => `H1 accepted (elo1 ${elo1})`],
  ["reject", ({ elo0 }) => `H0 accepted (elo0 ${elo0})`],
  ["continue", (test) => (test.is_exhausted ? "undecided: max_pairs reached" : "open")],
]);

const TEST_NOTE =
  "Elo of a test: of the pairs up to its decision and, from 30 on, free of the bias that an early stop brings. " +
  "Elo of a pairing: of all its games, with that bias.";

/** What a tournament's format or a test says beside the ratings: [title, headings, rows of cells, note]. */
function extrasOf({ tests, nulls, byes, ties }) {
  const seats = ({ agent, opponent }) => [named(agent), named(opponent)];
  return [
    [
      "SPRT",
      ["Player", "Against", "Pairs", "LLR", "Bounds", "Elo", "Decision"],
      tests.map((test) => [
        ...seats(test),
        whole(test.pairs),
        test.llr.toFixed(2),
        `${test.lower.toFixed(2)} to ${test.upper.toFixed(2)}`,
        test.elo ? eloRange(test.elo) : "–",
        DECISIONS.get(test.decision)(test),
      ]),
      TEST_NOTE,
    ],
    [
      "Null pairings: one player against itself, the noise floor",
      ["Player", "Against", "Won", "Drawn", "Lost", "Elo"],
      nulls.map((one) => [
        ...seats(one),
        whole(one.wins),
        whole(one.draws),
        whole(one.losses),
        eloRange(one.elo),
      ]),
    ],
    [
      "Byes",
      ["Player", "Round", "Points"],
      byes.map(({ agent, round, points: got }) => [named(agent), whole(round), points(got)]),
    ],
    [
      "Knock-out",
      ["Higher seed", "Other", "Round", "Points", "Goes on", "By"],
      [...ties]
        .sort((a, b) => a.round - b.round || a.tie - b.tie)
        .map(({ agents, round, points: got, winner, by }) => [
          ...agents.map(named),
          whole(round),
          got.map(points).join(" : "),
          named(winner),
          words(by),
        ]),
    ],
  ].filter(([, , rows]) => rows.length > 0);
}

function extraTable([title, headings, rows, note]) {
  const kind = (index) => (index < 2 || ["Goes on", "By", "Decision"].includes(headings[index]) ? "text" : "number");
  const cells = (row) => row.map((cell, index) => el("td", { class: kind(index) }, cell));
  return el(
    "section",
    { class: "panel extra", "aria-label": title, "data-testid": "extra" },
    el("h3", {}, title),
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ...headings.map((text, index) => el("th", { scope: "col", class: kind(index) }, text)))),
        el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row)))),
      ),
    ),
    note ? el("p", { class: "muted" }, note) : "",
  );
}

const STANDINGS_COLUMNS = [
  { title: "#", value: ({ place }) => (place === null ? "–" : whole(place)), hint: "place" },
  { title: "Player", isName: true },
  { title: "Games", value: ({ games }) => whole(games) },
  { title: "W", value: ({ wins }) => whole(wins), hint: "won" },
  { title: "D", value: ({ draws }) => whole(draws), hint: "drawn" },
  { title: "L", value: ({ losses }) => whole(losses), hint: "lost" },
  { title: "Points", value: (row) => points(row.points + row.bye_points), isStrong: true },
  {
    title: "Of byes",
    value: ({ bye_points: got }) => (got ? points(got) : ""),
    hint: "points without a game, part of the points",
  },
  { title: "Buchholz", value: ({ buchholz }) => hundredths(buchholz), hint: "points of the opponents" },
  {
    title: "S-B",
    value: (row) => hundredths(row.sonneborn_berger),
    hint: "Sonneborn-Berger: points of the opponents, by how much was won of them",
  },
  { title: "Rounds won", value: ({ rounds_won: won }) => (won === null ? "" : whole(won)) },
  { title: "Elo", value: (row) => withError(row.elo, row.elo_error), hint: "forfeits count as losses" },
  {
    title: "Skill Elo",
    value: (row) => withError(row.skill_elo, row.skill_elo_error),
    hint: "without forfeited games",
  },
  {
    title: "Protocol",
    value: ({ protocol_score: score }) => (score ? percent(score.value) : "–"),
    hint: "share of its games that it did not forfeit",
  },
  { title: "Forfeits", value: ({ forfeits }) => tally(forfeits) || "none", isText: true },
  { title: "Group", value: (row, table) => table.groupOf(row.name), hint: "whose ratings compare" },
];

function standingsTable(table) {
  const kind = ({ isName, isText }) => (isName || isText ? "text" : "number");
  const says = ({ isName, value }) => isName || table.rows.some((row) => value(row, table) !== "");
  const columns = STANDINGS_COLUMNS.filter(says);
  const head = columns.map((column) =>
    el("th", { scope: "col", class: kind(column), title: column.hint }, column.title),
  );
  const cell = (column, row) => {
    if (column.isName) return el("th", { scope: "row", class: "text" }, named(row.name));
    const text = column.value(row, table);
    const title = column.isText ? text : null;
    return el("td", { class: column.isStrong ? "number strong" : kind(column), title }, text);
  };
  return el(
    "table",
    { class: "standings", "data-testid": "standings" },
    el("caption", { class: "unseen" }, "Points and ratings"),
    el("thead", {}, el("tr", {}, ...head)),
    el(
      "tbody",
      {},
      ...table.rows.map((row) =>
        el("tr", { "data-testid": "standing" }, ...columns.map((column) => cell(column, row))),
      ),
    ),
  );
}

/** The Elo axis that holds every whisker: low, high, the ticks between, and those of them that have
a text on a narrow screen too (`sparse`). */
function eloAxis(rows) {
  const ends = rows.flatMap(({ value, error }) => [value - error, value + error]);
  const [low, high] = [Math.min(0, ...ends), Math.max(0, ...ends)];
  const reach = Math.max(high - low, 1);
  const step = ELO_STEPS.find((one) => reach / one <= 6) ?? ELO_STEPS.at(-1);
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(at);
  const sparse = [0];
  for (const at of [...ticks].sort((a, b) => Math.abs(b) - Math.abs(a)))
    if (sparse.every((other) => Math.abs(at - other) >= reach * (other ? APART : APART_FROM_ZERO)))
      sparse.push(at);
  return { low: low - reach * 0.04, high: high + reach * 0.04, ticks, sparse };
}

function ratingPlot(table, key) {
  const groups = table.ratings[key === "elo" ? "groups" : "skill_groups"];
  const groupOf = (name) => Math.max(0, groups.findIndex((group) => group.includes(name)));
  const rows = table.rows
    .filter((row) => isKnown(row[key]))
    .map((row) => ({ name: row.name, value: row[key], error: row[`${key}_error`], group: groupOf(row.name) }));
  if (rows.length === 0) return el("p", { class: "empty" }, "No game that counts has ended yet.");
  rows.sort((a, b) => a.group - b.group || b.value - a.value);
  const { low, high, ticks, sparse } = eloAxis(rows);
  const place = (node, at, to) => {
    node.style.left = `${(100 * (at - low)) / (high - low)}%`;
    if (to !== undefined) node.style.width = `${(100 * (to - at)) / (high - low)}%`;
    return node;
  };
  const lines = () =>
    ticks.map((at) => place(el("i", { class: at === 0 ? "tick zero" : "tick" }), at));
  const axis = el(
    "div",
    { class: "track axis" },
    ...ticks.map((at) =>
      place(el("span", { class: sparse.includes(at) ? "tick-text" : "tick-text minor" }, signed(at)), at),
    ),
  );
  const body = [];
  for (const [index, { name, value, error, group }] of rows.entries()) {
    if (groups.length > 1 && group !== rows[index - 1]?.group)
      body.push(
        el("tr", { class: "group" }, el("th", { colspan: "3", scope: "rowgroup", class: "text" }, `Group ${group + 1}`)),
      );
    const marks = [
      place(el("i", { class: "whisker" }), value - error, value + error),
      place(el("i", { class: "dot" }), value),
    ];
    const pairs = el("span", { class: "pairs" }, ` · ${plural(table.pairs.get(name), "pair")}`);
    body.push(
      el(
        "tr",
        { "data-testid": "rating" },
        el("th", { scope: "row", class: "text" }, named(name)),
        el("td", {}, el("div", { class: "track", "aria-hidden": "true" }, ...lines(), ...marks)),
        el("td", { class: "number" }, withError(value, error), pairs),
      ),
    );
  }
  return el(
    "table",
    { class: "ratings", "data-testid": "ratings" },
    el("caption", { class: "unseen" }, "Ratings with 95 % intervals"),
    el("tbody", {}, ...body),
    el("tfoot", { "aria-hidden": "true" }, el("tr", {}, el("td"), el("td", {}, axis), el("td", { class: "number" }, "Elo"))),
  );
}

/** Each player against each other, rows against columns: a table that says more of the cell under
the pointer or finger. Columns bear the numbers of the rows. */
class Matrix {
  #readout = el("p", { class: "readout muted" });
  #hint;
  #scroll;
  #table = null;
  #cells = new WeakMap();
  #testId;

  constructor(title, hint, below, above, testId) {
    this.#hint = hint;
    this.#testId = testId;
    this.#scroll = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
    const key = (kind, text) =>
      el("span", { class: "key" }, el("i", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);
    this.element = el(
      "section",
      { class: "panel matrix", "aria-label": title },
      el("div", { class: "matrix-head" }, el("h3", {}, title), el("div", { class: "keys" }, key("below", below), key("above", above))),
      this.#readout,
      scrollHint(this.#scroll),
      this.#scroll,
    );
    this.#scroll.addEventListener("pointerover", ({ target }) => this.#tell(target));
    // a finger leaves as it lifts: what was tapped stays told
    this.#scroll.addEventListener("pointerleave", ({ pointerType }) => {
      if (pointerType === "mouse") this.#tell(null);
    });
  }

  /** `cellOf(one, two)` is {share of 1, text, said} or null where nothing is known. */
  show(names, isBare, cellOf) {
    this.#tell(null);
    const head = names.map((name, index) =>
      el("th", { scope: "col", title: name, "aria-label": name }, String(index + 1)),
    );
    const rows = names.map((one, rank) =>
      el(
        "tr",
        {},
        el("td", { class: "number muted" }, String(rank + 1)),
        el("th", { scope: "row", class: "text" }, named(one)),
        ...names.map((two) => this.#cell(one, two, one === two ? null : cellOf(one, two), isBare)),
      ),
    );
    this.#table = el(
      "table",
      { class: isBare ? "cells bare" : "cells", "data-testid": this.#testId },
      el("thead", {}, el("tr", {}, el("td"), el("td"), ...head)),
      el("tbody", {}, ...rows),
    );
    const { scrollLeft, scrollTop } = this.#scroll;
    this.#scroll.replaceChildren(this.#table);
    Object.assign(this.#scroll, { scrollLeft, scrollTop });
  }

  #cell(one, two, cell, isBare) {
    if (one === two) return el("td", { class: "self" });
    const node = el("td", { class: cell ? (cell.share < 0.5 ? "below" : "above") : "unknown" }, cell?.text ?? "");
    if (cell) {
      const depth = Math.abs(cell.share - 0.5) * 2 * (isBare ? DEEPEST_BARE : DEEPEST);
      node.style.setProperty("--depth", `${depth.toFixed(1)}%`);
    }
    this.#cells.set(node, { one, two, said: cell?.said ?? "nothing is known" });
    return node;
  }

  #tell(node) {
    const cell = node && this.#cells.get(node);
    if (cell) this.#readout.replaceChildren(named(cell.one), " v ", named(cell.two), `: ${cell.said}`);
    else setText(this.#readout, this.#hint);
  }
}

function crossCell({ wins, draws, losses, games, numPairs, elo }) {
  const got = wins + draws / 2;
  const record = `${whole(wins)} won, ${whole(draws)} drawn, ${whole(losses)} lost`;
  return {
    share: got / games,
    text: `${points(got)}/${whole(games)}`,
    said: `${points(got)} of ${whole(games)} points (${record}) · Elo ${eloRange(elo)} · ${plural(numPairs, "pair")}`,
  };
}

function losCell(los) {
  if (los === null) return null;
  const shown = los > 0.995 ? ">99" : los < 0.005 ? "<1" : whole(los * 100);
  return { share: los, text: shown, said: `better with a likelihood of ${shown} %` };
}

export class StandingsView {
  #page;
  #data = null;
  #game = "";
  #key = "elo";
  #askedAt = -Infinity;
  #timer = null;
  #isAsking = false;
  #isShown = false;
  #games = el("div", { class: "game-choice" });
  #knownGames = "";
  #count = el("span", { class: "muted", "data-testid": "standings-count" });
  #empty = el("p", { class: "empty", "data-testid": "no-standings" }, "The standings are being made…");
  #notes = el("ul", { class: "standing-notes", "data-testid": "standing-notes" });
  #table = el("div", { class: "scroll frame", tabindex: "0", role: "region", "aria-label": "Table of standings" });
  #plot = el("div");
  #cross = new Matrix(
    "Points in each pairing",
    "Points of the row's player against the column's. Point at a cell or tap it for more.",
    "less than half",
    "more than half",
    "cross-table",
  );
  #los = new Matrix(
    "Likelihood of superiority, %",
    "How likely the row's player is the better one. Point at a cell or tap it for more.",
    "likely worse",
    "likely better",
    "los",
  );
  #extras = el("div", { class: "extras" });
  #matrices;
  #parts;

  constructor(root, page) {
    this.#page = page;
    const keys = choiceButtons(
      "Games that count",
      [
        ["elo", "All games"],
        ["skill_elo", "Without forfeits"],
      ],
      this.#key,
      (key) => {
        this.#key = key;
        this.#showPlot(new Table(this.#data, this.#game));
      },
      "rating-kind",
    );
    const plot = el(
      "section",
      { class: "panel", "aria-label": "Ratings" },
      el("div", { class: "matrix-head" }, el("h3", {}, "Elo with 95 % intervals"), keys),
      this.#plot,
    );
    this.#matrices = el("div", { class: "matrices" }, this.#cross.element, this.#los.element);
    this.#parts = [this.#table, this.#notes, this.#extras, plot, this.#matrices];
    root.append(
      el("div", { class: "bar" }, el("h2", {}, "Standings"), this.#count, this.#games),
      this.#empty,
      scrollHint(this.#table),
      ...this.#parts,
    );
    for (const part of this.#parts) setHidden(part, true);
  }

  show() {
    this.#isShown = true;
    this.#askedAt = -Infinity;
    this.#ask();
  }

  hide() {
    this.#isShown = false;
    clearTimeout(this.#timer);
    this.#timer = null;
  }

  /** The arena makes them seldom: while games are missing, it is asked again and again. */
  update() {
    if (this.#page.source.isStatic || !this.#isMissing()) return;
    this.#showCount();
    const wait = this.#page.state.isEnded ? 0 : this.#askedAt + STANDINGS_MS - performance.now();
    if (wait <= 0) this.#ask();
    else this.#timer ??= setTimeout(() => this.#ask(), wait);
  }

  #isMissing() {
    return this.#data === null || this.#numFinished() > this.#data.games;
  }

  #numFinished() {
    return this.#page.state.fleet?.matches.finished ?? 0;
  }

  async #ask() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (this.#isAsking || !this.#isShown) return;
    this.#askedAt = performance.now();
    this.#isAsking = true;
    const data = await this.#page.source.standings(this.#data?.games ?? null).catch(() => null);
    this.#isAsking = false;
    if (data) this.#take(data);
  }

  #take(data) {
    this.#data = data;
    const games = data.ratings.map(({ game }) => game);
    if (!games.includes(this.#game)) this.#game = games[0] ?? "";
    this.#offerGames(games);
    this.#showCount();
    setHidden(this.#empty, games.length > 0);
    setText(this.#empty, data.games ? "No game that counts has finished yet." : "No match has finished yet.");
    for (const part of this.#parts) setHidden(part, games.length === 0);
    if (games.length) this.#show();
  }

  #showCount() {
    if (this.#data === null) return;
    const newer = this.#numFinished() - this.#data.games;
    const more = newer > 0 ? `; ${whole(newer)} more to be counted in` : "";
    setText(this.#count, `${plural(this.#data.games, "finished game")}${more}`);
  }

  #offerGames(games) {
    const text = JSON.stringify(games);
    if (text === this.#knownGames) return;
    this.#knownGames = text;
    const choose = (game) => {
      this.#game = game;
      this.#show();
    };
    const options = games.map((game) => [game, game]);
    this.#games.replaceChildren(
      ...(games.length > 1 ? [choiceButtons("Game", options, this.#game, choose, "standings-game")] : []),
    );
  }

  #show() {
    const table = new Table(this.#data, this.#game);
    const isBare = table.names.length > MOST_NUMBERS;
    this.#matrices.classList.toggle("wide", table.names.length > MOST_BESIDE);
    const { scrollLeft, scrollTop } = this.#table;
    this.#table.replaceChildren(standingsTable(table));
    Object.assign(this.#table, { scrollLeft, scrollTop });
    this.#notes.replaceChildren(...notesOf(table, this.#page.source).map((note) => el("li", {}, ...note)));
    this.#extras.replaceChildren(...extrasOf(table).map(extraTable));
    this.#showPlot(table);
    this.#cross.show(table.names, false, (one, two) => {
      const met = table.met.get(one).get(two);
      return met ? crossCell(met) : null;
    });
    this.#los.show(table.names, isBare, (one, two) => losCell(table.los(one, two)));
  }

  #showPlot(table) {
    this.#plot.replaceChildren(ratingPlot(table, this.#key));
  }
}
