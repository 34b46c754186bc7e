/** Numbers and kinds in words. Unknown (null) is shown as a dash, never as zero. */

export const UNKNOWN = "–";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TENTHS = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export function isKnown(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** 12,345. */
export function whole(value) {
  return isKnown(value) ? WHOLE.format(Math.round(value) + 0) : UNKNOWN; // + 0: never "-0"
}

/** 121.3. */
export function tenths(value) {
  return isKnown(value) ? TENTHS.format(value) : UNKNOWN;
}

/** Three significant digits or so: 0.42, 8.1, 127. */
export function rounded(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (Number.isInteger(value) || Math.abs(value) >= 100) return WHOLE.format(value);
  return Math.abs(value) >= 1 || value === 0 ? TENTHS.format(value) : value.toPrecision(2);
}

/** A share of one as "97.3 %". */
export function percent(share) {
  if (!isKnown(share)) return UNKNOWN;
  return `${share >= 0.9995 ? "100" : TENTHS.format(share * 100)} %`;
}

/** Seconds of a run as "0:42", "12:05" or "3:07:20". */
export function clock(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  const total = Math.max(0, Math.floor(seconds));
  const [hours, minutes, rest] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  const tail = String(rest).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${tail}` : `${minutes}:${tail}`;
}

/** "8.4 s" below a minute, then as a clock. */
export function shortTime(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  return seconds < 60 ? `${TENTHS.format(Math.max(0, seconds))} s` : clock(seconds);
}

/** A kind from a record in words: "ply_cap" is "ply cap". */
export function words(kind) {
  return typeof kind === "string" ? kind.replaceAll("_", " ") : UNKNOWN;
}

/** {"illegal": 3, "empty": 1} as "illegal 3, empty 1", the most frequent first. */
export function tally(counts) {
  const entries = Object.entries(counts ?? {}).filter(([, count]) => count > 0);
  entries.sort((a, b) => b[1] - a[1]);
  return entries.map(([kind, count]) => `${words(kind)} ${whole(count)}`).join(", ");
}

export function sum(counts) {
  return Object.values(counts ?? {}).reduce((total, count) => total + count, 0);
}

/** How a finished match ended: "1–0", "0–1", "½–½" and the winner's name (null: a draw). */
export function outcome(first, second, winner) {
  if (winner === 0) return { score: "1–0", won: first };
  if (winner === 1) return { score: "0–1", won: second };
  return { score: "½–½", won: null };
}
