/** Boards as SVG: one symbol a piece, shared by every board; an update moves what changed. */

import { setAttribute, setText, svg } from "./dom.js";

const MOVE = /([a-z])(\d+)([a-z])(\d+)/;
const ALLOWED = new Set("g path rect circle ellipse line polyline polygon text tspan".split(" "));

/** The markup's shapes as nodes of this page, without anything that could act or load. */
function shapes(markup) {
  const text = `<svg xmlns="http://www.w3.org/2000/svg">${markup}</svg>`;
  const root = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  return [...root.children].map(copyShape).filter((node) => node !== null);
}

function copyShape(source) {
  if (!ALLOWED.has(source.localName)) return null;
  const copy = svg(source.localName);
  for (const { name, value } of source.attributes) {
    if (/^(?!on|style$|id$|href$)[a-z][a-z-]*\d?$/.test(name)) copy.setAttribute(name, value);
  }
  for (const child of source.childNodes) {
    if (child.nodeType === Node.TEXT_NODE) copy.append(child.data);
    else if (child.nodeType === Node.ELEMENT_NODE) copy.append(copyShape(child) ?? "");
  }
  return copy;
}

/** The drawings of the run's games; the symbols live in one hidden <svg>. */
export class Drawings {
  #games = new Map();
  #symbols = svg("defs");

  constructor() {
    const attributes = { class: "symbols", width: 0, height: 0, "aria-hidden": "true" };
    document.body.append(svg("svg", attributes, this.#symbols));
  }

  /** `games` is the arena's answer: name -> {drawing or null, side_names}. */
  load(games, style) {
    for (const [game, { drawing, side_names: sides }] of Object.entries(games)) {
      if (this.#games.has(game)) continue;
      this.#games.set(game, { sides, drawing: drawing && this.#define(`g${this.#games.size}`, drawing) });
    }
    this.setLabels(style);
  }

  /** Null for a game whose board nobody drew. */
  drawing(game) {
    return this.#games.get(game)?.drawing ?? null;
  }

  sideNames(game) {
    return this.#games.get(game)?.sides ?? ["first", "second"];
  }

  /** Every label style that is a choice in some game. */
  labelStyles() {
    const choices = [...this.#games.values()].map(({ drawing }) => drawing?.labels ?? []);
    return [...new Set(choices.filter((labels) => labels.length > 1).flat())];
  }

  /** Labels every piece in `style`; games without it keep their default. */
  setLabels(style) {
    for (const { drawing } of this.#games.values()) {
      if (!drawing) continue;
      const used = drawing.labels.includes(style) ? style : drawing.labels[0];
      const markup = new Map(Object.entries(drawing.pieces[used]));
      for (const [letter, symbol] of drawing.symbols)
        symbol.replaceChildren(...shapes(markup.get(letter) ?? ""));
    }
  }

  #define(prefix, drawing) {
    const symbols = new Map();
    for (const letter of Object.keys(drawing.pieces[drawing.labels[0]])) {
      symbols.set(letter, svg("g", { id: `${prefix}-${letter.codePointAt(0)}` }));
    }
    const board = svg("g", { id: `${prefix}-board`, class: "empty-board" }, ...shapes(drawing.board));
    this.#symbols.append(board, ...symbols.values());
    return { ...drawing, symbols, boardId: board.id };
  }
}

/** Square index -> FEN letter, or null where the FEN does not fit the drawing. */
function placement(fen, drawing) {
  const rows = fen.split(" ", 1)[0].split("[", 1)[0].split("/");
  if (rows.length !== drawing.ranks) return null;
  const pieces = new Map();
  for (const [row, text] of rows.entries()) {
    let file = 0;
    for (const [token] of text.matchAll(/\d+|[^~]/g)) {
      if (/\d/.test(token)) {
        file += Number(token);
      } else if (drawing.symbols.has(token) && file < drawing.files.length) {
        pieces.set(row * drawing.files.length + file, token);
        file += 1;
      } else {
        return null;
      }
    }
  }
  return pieces;
}

/** Square indices that the move names: from, to. Empty for a pass or no move. */
function squares(move, drawing) {
  const found = MOVE.exec(move ?? "");
  if (!found) return [];
  const index = (file, rank) => {
    const [column, row] = [drawing.files.indexOf(file), drawing.ranks - Number(rank)];
    return column < 0 || row < 0 || row >= drawing.ranks ? null : row * drawing.files.length + column;
  };
  return [index(found[1], found[2]), index(found[3], found[4])].filter((square) => square !== null);
}

/** One board; where there is no drawing it shows the FEN as text. */
export class Board {
  #drawing;
  #pieces = new Map();
  #layer = svg("g");
  #marks = [svg("rect", { class: "mark from" }), svg("rect", { class: "mark to" })];
  #text;
  #fen = null;

  constructor(drawing) {
    this.#drawing = drawing;
    const size = drawing ? `0 0 ${Number(drawing.width)} ${Number(drawing.height)}` : "0 0 8 8";
    this.element = svg("svg", { class: "board-picture", viewBox: size, "aria-hidden": "true" });
    this.#text = svg("text", { x: 0.3, y: 1, class: "fen" });
    if (drawing) {
      for (const mark of this.#marks) mark.style.display = "none";
      this.element.append(svg("use", { href: `#${drawing.boardId}` }), ...this.#marks, this.#layer);
    }
    this.element.append(this.#text);
  }

  /** Shows a position, the squares of `move` (null: none) marked. */
  show(fen, move) {
    const drawing = this.#drawing;
    const pieces = drawing && placement(fen, drawing);
    if (fen !== this.#fen) {
      this.#fen = fen;
      this.#place(pieces ?? new Map());
      this.#write(pieces ? "" : fen);
    }
    if (drawing) this.#mark(pieces ? squares(move, drawing) : []);
  }

  #place(target) {
    const free = new Map();
    for (const [square, piece] of this.#pieces) {
      if (target.get(square) === piece.letter) continue;
      this.#pieces.delete(square);
      free.set(piece.letter, [...(free.get(piece.letter) ?? []), piece]);
    }
    for (const [square, letter] of target) {
      if (this.#pieces.has(square)) continue;
      const piece = free.get(letter)?.pop() ?? this.#newPiece(letter);
      const [x, y] = this.#centre(square);
      piece.node.style.transform = `translate(${x}px, ${y}px)`;
      this.#pieces.set(square, piece);
    }
    for (const unused of free.values()) for (const { node } of unused) node.remove();
  }

  #newPiece(letter) {
    const node = svg("use", { href: `#${this.#drawing.symbols.get(letter).id}` });
    this.#layer.append(node);
    return { letter, node };
  }

  #mark(marked) {
    for (const [index, mark] of this.#marks.entries()) {
      const square = marked[index];
      mark.style.display = square === undefined ? "none" : "";
      if (square === undefined) continue;
      const [x, y] = this.#centre(square);
      setAttribute(mark, "x", String(x - 0.5));
      setAttribute(mark, "y", String(y - 0.5));
    }
  }

  #centre(square) {
    const { files, left, top } = this.#drawing;
    return [left + (square % files.length), top + Math.floor(square / files.length)];
  }

  /** A FEN in lines, since SVG text does not wrap. */
  #write(text) {
    const lines = text.match(/.{1,18}/gu) ?? [];
    if (lines.length === 0) setText(this.#text, "");
    else
      this.#text.replaceChildren(
        ...lines.slice(0, 12).map((line) => svg("tspan", { x: 0.3, dy: "1.4em" }, line)),
      );
  }
}
