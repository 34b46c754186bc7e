/** Elements made without markup: every text goes through textContent or setAttribute. */

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** An HTML element; attributes that are null are left out. Children are nodes or text. */
export function el(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** Somebody else's name, kept apart from the words around it. */
export function named(name) {
  return el("span", { class: "name", title: name }, name);
}

/** Sets the text of a node that holds nothing else, when it differs. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export function setHidden(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

/** A select with its label in front of it; `options` are [value, text] pairs. */
export function labelledSelect(text, options, attributes = {}) {
  const select = el("select", attributes, ...options.map(([value, name]) => el("option", { value }, name)));
  return { select, label: el("label", { class: "field" }, el("span", {}, text), select) };
}

/** A line for above a region that scrolls: seen while it has columns out of sight to the right. */
export function scrollHint(region) {
  const hint = el(
    "p",
    { class: "scroll-hint muted", hidden: "", "data-testid": "scroll-hint" },
    "More columns: scroll sideways →",
  );
  const update = () => {
    const left = region.scrollWidth - region.clientWidth;
    setHidden(hint, left <= 1);
    hint.classList.toggle("at-end", region.scrollLeft >= left - 1);
  };
  region.addEventListener("scroll", update);
  new ResizeObserver(update).observe(region);
  new MutationObserver(update).observe(region, { childList: true, subtree: true });
  return hint;
}

/** Offers "all" and these values in a select, keeping the choice while it is offered. */
export function choicesOf(select, values, textOf = (value) => value) {
  const known = [...select.options].slice(1).map(({ value }) => value);
  if (known.length === values.length && known.every((value, index) => value === values[index])) return;
  const chosen = select.value;
  select.replaceChildren(
    el("option", { value: "" }, "all"),
    ...values.map((value) => el("option", { value }, textOf(value))),
  );
  select.value = values.includes(chosen) ? chosen : "";
}

/** Buttons of which one is pressed; `options` are [value, text] pairs. Calls `choose(value)`. */
export function choiceButtons(name, options, chosen, choose, testId) {
  const buttons = options.map(([value, text]) => {
    const button = el("button", { type: "button", "aria-pressed": String(value === chosen) }, text);
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      choose(value);
    });
    return button;
  });
  return el(
    "div",
    { class: "choices", role: "group", "aria-label": name, "data-testid": testId },
    ...buttons,
  );
}

/** What the visitor chose before, or `fallback`: storage may be blocked or hold anything. */
export function recall(key, allowed, fallback) {
  try {
    const value = localStorage.getItem(`boardfleet.${key}`);
    return allowed.includes(value) ? value : fallback;
  } catch {
    return fallback;
  }
}

export function remember(key, value) {
  try {
    localStorage.setItem(`boardfleet.${key}`, value);
  } catch {
    // blocked storage: the choice lasts as long as the page
  }
}
