// Elements from plain calls. Strings become text nodes only: nothing here turns a string into
// markup, so a payload or a name cannot become part of the page. The console's safety relies on
// this rule.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element. Keys: attributes; `on...`: listeners; `class`, `dataset`; true and false for
 * boolean attributes.
 */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
}

/** Replace the children of an element. */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Write only what differs: an untouched node costs no layout and is not announced again. */
export function setText(element, text) {
  const written = String(text);
  if (element.textContent !== written) element.textContent = written;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else {
    const written = value === true ? "" : String(value);
    if (element.getAttribute(name) !== written) element.setAttribute(name, written);
  }
}

/**
 * Synchronize the children of `parent` with `items`, reusing a part per key: { element,
 * update(item) }.
 */
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.parts = new Map();
  }

  show(items, keyOf) {
    const wanted = new Map();
    for (const item of items) {
      const key = keyOf(item);
      const part = this.parts.get(key) ?? this.make(item);
      part.update(item);
      wanted.set(key, part);
    }
    for (const [key, part] of this.parts) if (!wanted.has(key)) part.element.remove();
    let before = this.parent.firstChild;
    for (const part of wanted.values()) {
      if (part.element === before) before = before.nextSibling;
      else this.parent.insertBefore(part.element, before);
    }
    this.parts = wanted;
  }
}

let serial = 0;

/** Return a unique id for labels and descriptions. */
export function freshId(stem) {
  serial += 1;
  return `${stem}-${serial}`;
}
