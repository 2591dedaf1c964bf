// Elements without markup: whatever comes from the database becomes the text of a node and nothing else.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]|[\u{e0000}-\u{e007f}]/gu;

/** Text with control and direction characters written out, so that it cannot rearrange the page. */
function visible(text) {
  return String(text).replace(HIDDEN, (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`);
}

/** An element; "class" and other attributes as given, functions as listeners, the rest as children. */
function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "circle", "rect", "line", "text", "title", "g"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : visible(value));
  }
  append(element, children);
  return element;
}

function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : visible(child));
  }
}

const find = (id) => document.getElementById(id);
const format = new Intl.NumberFormat("en");
const count = (number, one, many = `${one}s`) => `${format.format(number)} ${number === 1 ? one : many}`;
const short = (number) => (number < 10000 ? format.format(Math.round(number)) : new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(number).replace("K", "k"));
const words = (name) => name.replaceAll("_", " ");

function percent(fraction) {
  const value = 100 * fraction;
  if (value === 0) return "0 %";
  return value < 0.01 ? "< 0.01 %" : `${value >= 99.95 ? value.toFixed(2) : value.toPrecision(3)} %`;
}

function when(seconds) {
  return seconds ? new Date(seconds * 1000).toISOString().replace("T", " ").replace("Z", "").slice(0, 23) : "–";
}

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 90) return `${seconds.toPrecision(3)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Rows of one height, of which only those in view exist. */
class Rows {
  constructor(scroller, height, draw) {
    Object.assign(this, { scroller, height, draw, length: 0, waiting: false });
    this.body = el("div", { class: "rows" });
    scroller.append(this.body);
    scroller.addEventListener("scroll", () => this.redraw(), { passive: true });
    new ResizeObserver(() => this.redraw()).observe(scroller);
  }

  show(length) {
    this.length = length;
    this.body.style.height = `${length * this.height}px`;
    this.redraw();
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      const top = Math.max(0, this.scroller.scrollTop - this.body.offsetTop);
      const first = Math.max(0, Math.floor(top / this.height) - 8);
      const last = Math.min(this.length, Math.ceil((top + this.scroller.clientHeight) / this.height) + 8);
      const rows = [];
      for (let i = first; i < last; i++) {
        const row = this.draw(i);
        row.style.top = `${i * this.height}px`;
        rows.push(row);
      }
      const focused = this.body.contains(document.activeElement);
      this.body.replaceChildren(...rows);
      if (focused) this.scroller.focus({ preventScroll: true });
    });
  }

  bringIntoView(index) {
    const top = this.body.offsetTop + index * this.height;
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop + this.height || top > scrollTop + clientHeight - 2 * this.height) {
      this.scroller.scrollTop = top - clientHeight / 2;
    }
    this.redraw();
  }
}
