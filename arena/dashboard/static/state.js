/** The run as the page knows it: full frames replace it, deltas mend it. */

const KEPT_BUCKETS = 300;

export function agentKey(agent) {
  return JSON.stringify([agent.name, agent.game]);
}

/** What one frame changed; views ask it before they touch the page. */
export class Changes {
  isFull = false;
  agents = new Set();
  boards = new Set();
  hasResults = false;
  hasTelemetry = false;

  /** Adds what a later frame changed, for a view that was not drawn in between. */
  merge(later) {
    this.isFull ||= later.isFull;
    for (const key of later.agents) this.agents.add(key);
    for (const id of later.boards) this.boards.add(id);
    this.hasResults ||= later.hasResults;
    this.hasTelemetry ||= later.hasTelemetry;
  }
}

export class RunState {
  run = null;
  fleet = null;
  verdict = null;
  isEnded = false;
  engines = [];
  agents = new Map();
  boards = new Map();
  pages = { page: 0, pages: 1, boards: 0 };
  results = [];
  telemetry = new Map();

  /** Matches that are not finished. */
  get numLeft() {
    const { scheduled = 0, running = 0, suspended = 0 } = this.fleet?.matches ?? {};
    return scheduled + running + suspended;
  }

  /** Whether matches may yet be added. */
  get canGrow() {
    return this.run?.can_grow === true;
  }

  /** Takes a frame in and returns its Changes. */
  apply(frame) {
    const changes = new Changes();
    changes.isFull = frame.full === true;
    if (changes.isFull) {
      this.agents = new Map();
      this.boards = new Map();
      this.telemetry = new Map();
      this.results = [];
    }
    for (const field of ["run", "fleet", "verdict", "engines", "pages"]) {
      if (frame[field] !== undefined) this[field] = frame[field];
    }
    this.isEnded = frame.ended === true;
    this.#applyRows(frame, changes);
    this.#applyTelemetry(frame.telemetry, changes);
    return changes;
  }

  #applyRows(frame, changes) {
    for (const agent of frame.agents ?? []) {
      this.agents.set(agentKey(agent), agent);
      changes.agents.add(agentKey(agent));
    }
    for (const id of frame.gone ?? []) {
      this.boards.delete(id);
      changes.boards.add(id);
    }
    for (const board of frame.boards ?? []) {
      this.boards.set(board.match, board);
      changes.boards.add(board.match);
    }
    if (frame.results) {
      this.results = frame.results;
      changes.hasResults = true;
    }
  }

  #applyTelemetry(telemetry, changes) {
    for (const [engine, added] of Object.entries(telemetry ?? {})) {
      if (added.length === 0) continue;
      const buckets = this.telemetry.get(engine) ?? [];
      for (const bucket of added) {
        while (buckets.length && buckets.at(-1).at >= bucket.at) buckets.pop();
        buckets.push(bucket);
      }
      this.telemetry.set(engine, buckets.slice(-KEPT_BUCKETS));
      changes.hasTelemetry = true;
    }
  }
}
