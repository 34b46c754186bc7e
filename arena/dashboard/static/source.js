/** Where the page's data comes from: a live arena over HTTP, or a report's embedded JSON.

Both answer the same questions. `open(listener)` calls `listener.frame(frame)` for every frame and
`listener.status({kind, …})` when the connection changes: "connecting", "live", "lost", "ended",
"refused" (no token), "busy" (too many pages), "static". */

/** Boards on a page, as of the arena (exhibit.py). */
export const GRID = 64;
const RETRY_MS = 5000;

export class LiveSource {
  isStatic = false;
  #listener = null;
  #stream = null;
  #page = 0;
  #retry = null;

  open(listener) {
    this.#listener = listener;
    listener.status({ kind: "connecting" });
    this.#connect();
  }

  /** Asks for another page of boards; a full frame of it follows. */
  setPage(page) {
    this.#page = page;
    this.#connect();
  }

  async games() {
    return (await this.#json("api/games")) ?? {};
  }

  /** Whether it has the moves of a match that it tells of. */
  holds() {
    return true;
  }

  /** The match with all its plies, or null when the arena does not know it. */
  match(id) {
    return this.#json(`api/matches/${encodeURIComponent(id)}`);
  }

  /** Finished matches that fit a wish: {player, game, how, result, sort, order}. */
  results(offset, limit, wish) {
    return this.#json(`api/matches?${new URLSearchParams({ offset, limit, ...wish })}`);
  }

  /** The tables of the standings; null to one who knows those of as many games. */
  standings(known) {
    return this.#json(known === null ? "api/standings" : `api/standings?known=${known}`);
  }

  histogram(agent, game) {
    return this.#json(`api/histogram?agent=${encodeURIComponent(agent)}&game=${encodeURIComponent(game)}`);
  }

  /** Buckets of `span` seconds (1, 10, 100, 1000) over the whole run, as `{span_s, buckets}`. */
  telemetry(engine, span) {
    return this.#json(`api/telemetry?engine=${encodeURIComponent(engine)}&span=${span}`);
  }

  #connect() {
    this.#stream?.close();
    clearTimeout(this.#retry);
    const stream = new EventSource(`api/events?page=${this.#page}`);
    this.#stream = stream;
    stream.addEventListener("frame", (event) => this.#receive(stream, event.data));
    stream.addEventListener("open", () => this.#listener.status({ kind: "live" }));
    stream.addEventListener("error", () => this.#fail(stream));
  }

  #receive(stream, data) {
    if (stream !== this.#stream) return;
    const frame = JSON.parse(data);
    if (frame.ended) stream.close();
    this.#listener.frame(frame);
    this.#listener.status({ kind: frame.ended ? "ended" : "live" });
  }

  #fail(stream) {
    if (stream !== this.#stream) return;
    this.#listener.status({ kind: "lost" });
    // while it is CONNECTING the browser itself tries again, with the id of the last frame
    if (stream.readyState === EventSource.CLOSED) this.#explain();
  }

  /** An event stream hides why it was closed: asks once more, plainly. */
  async #explain() {
    const answer = await fetch(`api/snapshot?page=${this.#page}`).catch(() => null);
    if (answer?.status === 401 || answer?.status === 403) {
      this.#listener.status({ kind: "refused" });
      return;
    }
    const frame = answer?.ok ? await answer.json().catch(() => null) : null;
    if (frame?.ended) {
      this.#listener.frame(frame);
      this.#listener.status({ kind: "ended" });
      return;
    }
    if (frame) this.#listener.status({ kind: "busy" });
    this.#retry = setTimeout(() => this.#connect(), RETRY_MS);
  }

  async #json(url) {
    const answer = await fetch(url);
    if (answer.status === 404 || answer.status === 204) return null;
    if (!answer.ok) throw new Error(`the arena answered ${answer.status}`);
    return answer.json();
  }
}

function compareValues(a, b) {
  return Number(a > b) - Number(a < b);
}

/** What a match must have to be wished for; what each has stands beside it (browse.py). */
function facetsOf({ player, game, how, result }) {
  const whose = ["won", "lost"].includes(result) ? ` ${player}` : "";
  const wished = { player, game, how, result: result && result + whose };
  return Object.entries(wished).flatMap(([key, value]) => (value ? [`${key} ${value}`] : []));
}

export class StaticSource {
  isStatic = true;
  #data;
  #listener = null;
  #stepped;

  /** `data` is the report's JSON: frame, games, details, histograms, telemetry, results, standings,
  notes. */
  constructor(data) {
    this.#data = data;
    this.#stepped = Object.values(data.details ?? {}).sort((a, b) => a.number - b.number);
  }

  get notes() {
    return this.#data.notes ?? [];
  }

  open(listener) {
    this.#listener = listener;
    this.setPage(0);
    listener.status({ kind: "static" });
  }

  /** The grid of a report holds the games that can be stepped through. */
  setPage(page) {
    const boards = this.#stepped.slice(page * GRID, (page + 1) * GRID);
    const pages = {
      page,
      pages: Math.max(1, Math.ceil(this.#stepped.length / GRID)),
      boards: this.#stepped.length,
    };
    this.#listener.frame({ ...this.#data.frame, full: true, boards, pages });
  }

  async games() {
    return this.#data.games ?? {};
  }

  holds(id) {
    return Object.hasOwn(this.#data.details ?? {}, id);
  }

  async match(id) {
    return this.holds(id) ? this.#data.details[id] : null;
  }

  async results(offset, limit, wish) {
    const wanted = facetsOf(wish);
    const found = this.#data.results.results.filter(({ facets }) =>
      wanted.every((facet) => facets.includes(facet)),
    );
    const direction = wish.order === "ascending" ? 1 : -1;
    if (direction < 0) found.reverse();
    found.sort((a, b) => direction * compareValues(a.sort[wish.sort], b.sort[wish.sort]));
    const results = found.slice(offset, offset + limit);
    return { ...this.#data.results, total: found.length, results };
  }

  async standings() {
    return this.#data.standings ?? null;
  }

  async histogram(agent, game) {
    return (this.#data.histograms ?? []).find((one) => one.agent === agent && one.game === game) ?? null;
  }

  /** The finest buckets kept that are at least `span` seconds long, else the coarsest there are. */
  async telemetry(engine, span) {
    const kept = new Map(Object.entries(this.#data.telemetry ?? {})).get(engine);
    if (!kept) return null;
    const spans = Object.keys(kept)
      .map(Number)
      .filter((one) => kept[one].length)
      .sort((a, b) => a - b);
    const best = spans.find((one) => one >= span) ?? spans.at(-1);
    return best === undefined ? null : { span_s: best, buckets: kept[best] };
  }
}

/** The source this page has: static where it carries embedded data. */
export function openSource() {
  const embedded = document.getElementById("embedded");
  return embedded ? new StaticSource(JSON.parse(embedded.textContent)) : new LiveSource();
}
