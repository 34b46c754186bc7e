/** Starts the page: data in, four views and one match behind real addresses. */

import { shortTime, whole } from "./text.js";
import { choiceButtons, el, recall, remember, setAttribute, setHidden, setText } from "./dom.js";
import { Changes, RunState } from "./state.js";
import { openSource } from "./source.js";
import { Drawings } from "./boards.js";
import { forgetPalette } from "./charts.js";
import { FleetView, verdictTitle } from "./fleet.js";
import { StandingsView } from "./standings.js";
import { AgentsView } from "./agents.js";
import { MatchesView } from "./matches.js";
import { MatchView } from "./match.js";

const STALE_MS = 10000;
const THEMES = ["auto", "light", "dark"];
const LABELS = ["hanja", "hangul", "letters"];
const VIEWS = [
  ["fleet", FleetView],
  ["standings", StandingsView],
  ["agents", AgentsView],
  ["matches", MatchesView],
  ["match", MatchView],
];
const TITLES = new Map([
  ["fleet", "Fleet"],
  ["standings", "Standings"],
  ["agents", "Agents"],
  ["matches", "Matches"],
  ["match", "Match"],
]);
const STATUS = new Map([
  ["connecting", "connecting…"],
  ["live", "live"],
  ["lost", "connection lost"],
  ["busy", "connection lost"],
  ["refused", "not allowed"],
  ["ended", "the run is over"],
  ["left", "not played now"],
  ["static", "report"],
]);

function byId(id) {
  return document.getElementById(id);
}

/** {name, id} of the address: id is the match of "#match=ID". */
function route() {
  const [name, value] = [
    location.hash.slice(1).split("=", 1)[0],
    location.hash.split("=").slice(1).join("="),
  ];
  if (name === "match" && value) {
    try {
      return { name, id: decodeURIComponent(value) };
    } catch {
      return { name: "matches", id: null };
    }
  }
  return { name: ["standings", "agents", "matches"].includes(name) ? name : "fleet", id: null };
}

/** The banner and the words about the connection. */
class Connection {
  #kind = "connecting";
  #updatedAt = null;
  #numLeft = 0;
  #canGrow = false;
  #said = "";
  #timer = null;

  /** A report needs no clock: nothing in it grows old. */
  watch() {
    this.#timer = setInterval(() => this.#show(), 1000);
  }

  /** Takes note of a frame: how many matches are not finished, and whether more may come. */
  frame({ numLeft, canGrow }) {
    this.#updatedAt = performance.now();
    this.#numLeft = numLeft;
    this.#canGrow = canGrow;
  }

  /** An ended run with matches left is "left": it may be resumed. */
  status(kind) {
    if (this.#kind === "ended" || this.#kind === "left") return;
    this.#kind = kind === "ended" && (this.#numLeft > 0 || this.#canGrow) ? "left" : kind;
    if (kind === "ended") clearInterval(this.#timer);
    this.#show();
  }

  #show() {
    const text = STATUS.get(this.#kind);
    setText(byId("status"), text);
    setAttribute(byId("status"), "data-kind", this.#kind);
    const banner = this.#banner();
    setText(byId("connection"), banner);
    setHidden(byId("connection"), banner === "");
    if (this.#said && this.#said !== text) setText(byId("announcer"), `Connection: ${text}`);
    this.#said = text;
  }

  #banner() {
    const age = this.#updatedAt === null ? null : performance.now() - this.#updatedAt;
    const last = age === null ? "" : `Last update ${Math.round(age / 1000)} s ago. `;
    if (this.#kind === "refused")
      return "The arena did not let this page in: the token is missing or wrong. Open the address that the arena printed when it started.";
    if (this.#kind === "left") {
      const matches = this.#numLeft === 1 ? "1 match is" : `${whole(this.#numLeft)} matches are`;
      const more = this.#canGrow ? ", and more may come" : "";
      return `Nobody plays this run now: ${matches} left${more}. “arena resume” goes on with it.`;
    }
    if (this.#kind === "busy")
      return `The arena shows itself to as many pages as it can. ${last}Trying again.`;
    if (this.#kind === "lost") return `Connection lost. ${last}Trying again.`;
    if (this.#kind === "live" && age > STALE_MS)
      return `Nothing new from the arena for ${shortTime(age / 1000)}.`;
    return "";
  }
}

class Page {
  state = new RunState();
  source = openSource();
  drawings = new Drawings();
  labelChoice = el("div", { class: "label-choice" });
  isReady = false;
  #connection = new Connection();
  #views = new Map();
  #pending = new Map();
  #route = null;
  #scrolls = new Map();
  #isScheduled = false;
  #verdict = "";

  start() {
    for (const [name, View] of VIEWS) {
      this.#views.set(name, new View(byId(`view-${name}`), this));
      this.#pending.set(name, new Changes());
    }
    this.#offerThemes();
    byId("skip").addEventListener("click", (event) => {
      event.preventDefault(); // the address names the view
      byId("main").focus();
    });
    addEventListener("hashchange", () => this.#navigate());
    document.addEventListener("visibilitychange", () => this.#schedule());
    addEventListener("load", () => this.#paint());
    this.#navigate();
    document.documentElement.dataset.source = this.source.isStatic ? "static" : "live";
    if (!this.source.isStatic) this.#connection.watch();
    this.source.open({
      frame: (frame) => this.#receive(frame),
      status: ({ kind }) => this.#connection.status(kind),
    });
    this.#showNotes();
    this.#loadGames();
  }

  async #loadGames() {
    const games = await this.source.games().catch(() => null);
    if (games === null) {
      setTimeout(() => this.#loadGames(), 3000);
      return;
    }
    this.#offerLabels(games);
    this.isReady = true;
    this.#pending.get("matches").isFull = true;
    this.#views.get(this.#route.name).show?.(this.#route.id);
    this.#schedule();
  }

  #receive(frame) {
    const changes = this.state.apply(frame);
    this.#connection.frame(this.state);
    for (const pending of this.#pending.values()) pending.merge(changes);
    this.#schedule();
  }

  /** Draws with the next picture of the screen; a hidden tab has none until it is seen again. */
  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    requestAnimationFrame(() => {
      this.#isScheduled = false;
      this.#draw();
    });
  }

  #draw() {
    const { run, verdict, engines, fleet } = this.state;
    if (!fleet) return;
    setText(byId("run-name"), run?.name ?? "");
    const title = [TITLES.get(this.#route.name), run?.name, "Boardfleet"].filter(Boolean).join(" · ");
    if (document.title !== title) document.title = title;
    this.#showVerdict(verdict, engines);
    const { name } = this.#route;
    const changes = this.#pending.get(name);
    if (name !== "matches" || this.isReady) this.#pending.set(name, new Changes());
    this.#views.get(name).update(changes);
  }

  #showVerdict(verdict, engines) {
    const text = verdict ? verdictTitle(verdict, engines) : "";
    const chip = byId("verdict-chip");
    setHidden(chip, text === "");
    if (text === this.#verdict) return;
    setText(chip, `⚠ ${text}`);
    setText(byId("announcer"), text ? `Saturation: ${text}` : "No sign of saturation any more");
    this.#verdict = text;
  }

  #navigate() {
    const before = this.#route;
    const next = route();
    if (before) {
      this.#scrolls.set(before.name, scrollY);
      this.#views.get(before.name).hide?.();
    }
    this.#route = next;
    for (const name of this.#views.keys()) setHidden(byId(`view-${name}`), name !== next.name);
    const tab = next.name === "match" ? "matches" : next.name;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${tab}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.#views.get(next.name).show?.(next.id);
    this.#draw();
    scrollTo(0, next.name === "match" ? 0 : (this.#scrolls.get(next.name) ?? 0));
    if (before?.name === "match" && next.name === "matches") this.#views.get("matches").focus(before.id);
  }

  #paint() {
    forgetPalette();
    for (const view of this.#views.values()) view.paint?.();
  }

  #offerThemes() {
    const show = (theme) => {
      if (theme === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = theme;
      this.#paint();
    };
    const chosen = recall("theme", THEMES, "auto");
    const options = THEMES.map((theme) => [theme, theme.charAt(0).toUpperCase() + theme.slice(1)]);
    const choose = (theme) => {
      remember("theme", theme);
      show(theme);
    };
    byId("theme").append(choiceButtons("Theme", options, chosen, choose, "theme"));
    show(chosen);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#paint());
  }

  #offerLabels(games) {
    const chosen = recall("labels", LABELS, LABELS[0]);
    this.drawings.load(games, chosen);
    const styles = this.drawings.labelStyles();
    if (styles.length === 0) return;
    const choose = (style) => {
      remember("labels", style);
      this.drawings.setLabels(style);
    };
    const options = styles.map((style) => [style, style.charAt(0).toUpperCase() + style.slice(1)]);
    const shown = styles.includes(chosen) ? chosen : styles[0];
    this.labelChoice.append(
      el("span", { class: "muted" }, "Janggi labels"),
      choiceButtons("Janggi labels", options, shown, choose, "labels"),
    );
  }

  #showNotes() {
    const notes = this.source.isStatic ? this.source.notes : [];
    byId("notes").append(...notes.map((note) => el("li", {}, note)));
    setHidden(byId("notes"), notes.length === 0);
  }
}

export function start() {
  new Page().start();
}

start();
