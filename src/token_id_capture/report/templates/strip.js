// The tokens as rows of cells. Only the rows in view are drawn, however long the sequence is.

const CELL = 10, GAP = 2, ROW = 22, HIGH = 15, LOW = 5, MARGIN = 8;

class Strip {
  constructor(element, canvas, spacer) {
    Object.assign(this, { element, canvas, spacer, sequence: null, selected: 0, columns: 1, waiting: false });
    this.palette = currentPalette();
    this.onView = () => {};
    element.addEventListener("scroll", () => this.redraw());
    // In a frame of its own: what it lays out changes the size that is observed.
    new ResizeObserver(() => requestAnimationFrame(() => this.layOut())).observe(element);
  }

  show(sequence) {
    this.sequence = sequence;
    this.selected = 0;
    this.element.scrollTop = 0;
    this.layOut();
  }

  layOut() {
    if (!this.sequence) return;
    this.width = this.element.clientWidth;
    this.columns = Math.max(1, Math.floor((this.width - 2 * MARGIN) / CELL));
    this.rows = Math.ceil(this.sequence.length / this.columns);
    const height = this.rows * ROW + 2 * MARGIN;
    this.spacer.style.height = `${height}px`;
    // As high as it has rows, up to the style's max-height.
    this.element.style.height = `${height + this.element.offsetHeight - this.element.clientHeight}px`;
    this.height = this.element.clientHeight;
    this.redraw();
  }

  get rowsInView() {
    return Math.max(1, Math.floor((this.height - 2 * MARGIN) / ROW));
  }

  /** The positions in view: from the first, up to and without the second. */
  get view() {
    const first = Math.max(0, Math.floor((this.element.scrollTop - MARGIN) / ROW));
    const last = Math.ceil((this.element.scrollTop + this.height) / ROW);
    return [first * this.columns, Math.min(this.sequence.length, last * this.columns)];
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
      this.onView();
    });
  }

  draw() {
    const context = prepareCanvas(this.canvas, this.width, this.height);
    const [first, end] = this.view;
    const { shades, second } = this.palette;
    let part = this.sequence.partAt(first);
    for (let i = first; i < end; i++) {
      while (i >= part.end) part = this.sequence.partAt(i);
      const [x, y] = this.corner(i);
      const shade = shadeOf(this.sequence.logProbs[i]);
      const height = shade ? HIGH : LOW;
      context.fillStyle = shades[shade];
      context.fillRect(x, y + HIGH - height, CELL - GAP, height);
      if (i === part.start && i > 0) {
        context.fillStyle = second;
        context.fillRect(x - GAP, y - 3, 1, HIGH + 4);
      }
    }
    if (this.selected >= first && this.selected < end) this.ring(context, ...this.corner(this.selected));
  }

  ring(context, x, y) {
    context.lineWidth = 4;
    context.strokeStyle = this.palette.surface;
    context.strokeRect(x - 1, y - 1, CELL - GAP + 2, HIGH + 2);
    context.lineWidth = 2;
    context.strokeStyle = this.palette.focus;
    context.strokeRect(x - 2, y - 2, CELL - GAP + 4, HIGH + 4);
  }

  /** Where the cell of a position is drawn, in pixels of the canvas. */
  corner(position) {
    const row = Math.floor(position / this.columns), column = position % this.columns;
    return [MARGIN + column * CELL, MARGIN + row * ROW - this.element.scrollTop];
  }

  /** The position under a pointer; -1 if there is none. */
  positionAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - MARGIN) / CELL);
    const row = Math.floor((event.clientY - box.top + this.element.scrollTop - MARGIN) / ROW);
    const position = row * this.columns + column;
    return row < 0 || column < 0 || column >= this.columns || position >= this.sequence.length ? -1 : position;
  }

  select(position) {
    this.selected = Math.min(this.sequence.length - 1, Math.max(0, position));
    const top = Math.floor(this.selected / this.columns) * ROW;
    const { scrollTop } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + ROW + 2 * MARGIN > scrollTop + this.height) this.element.scrollTop = top + ROW + 2 * MARGIN - this.height;
    this.redraw();
  }

  /** Where a key leads to; null if it is none of the strip's. */
  keyTarget(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return null;
    const at = this.selected, page = this.rowsInView * this.columns;
    const part = this.sequence.partAt(at);
    if (event.shiftKey && event.key === "ArrowRight") return part.end;
    if (event.shiftKey && event.key === "ArrowLeft") return at > part.start ? part.start : this.sequence.partAt(at - 1).start;
    if (event.key === "n" || event.key === "N") return this.sequence.nextUnlikely(at) < 0 ? at : this.sequence.nextUnlikely(at);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns, PageDown: page, PageUp: -page };
    if (event.key in steps) return at + steps[event.key];
    return { Home: 0, End: this.sequence.length - 1 }[event.key] ?? null;
  }
}

/** The whole sequence in one line: how much of each stretch was sampled, and how likely it was. */
class SequenceMap {
  constructor(canvas, strip) {
    Object.assign(this, { canvas, strip, columns: [] });
  }

  show(sequence) {
    this.sequence = sequence;
    this.width = 0;
  }

  summarise(width) {
    this.width = width;
    this.columns = Array.from({ length: width }, (_, x) => {
      const from = Math.floor((x * this.sequence.length) / width);
      const to = Math.max(from + 1, Math.floor(((x + 1) * this.sequence.length) / width));
      let sampled = 0, sum = 0;
      for (let i = from; i < to; i++) if (this.sequence.isSampled(i)) (sampled++, (sum += this.sequence.logProbs[i]));
      return { fraction: sampled / (to - from), shade: sampled ? shadeOf(sum / sampled) : 0 };
    });
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(this.canvas.parentElement).paddingLeft);
    if (Math.floor(width) !== this.width) this.summarise(Math.floor(width));
    const context = prepareCanvas(this.canvas, this.width, 34);
    const { shades, ink } = this.strip.palette;
    this.columns.forEach(({ fraction, shade }, x) => {
      context.fillStyle = shades[0];
      context.fillRect(x, 25, 1, 5);
      context.fillStyle = shades[shade];
      if (shade) context.fillRect(x, 30 - 5 - 21 * fraction, 1, 5 + 21 * fraction);
    });
    const [first, end] = this.strip.view;
    const scale = this.width / this.sequence.length;
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    context.strokeRect(first * scale + 1, 1, Math.max(4, (end - first) * scale - 2), 32);
  }

  positionAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return Math.round(((event.clientX - box.left) / box.width) * this.sequence.length);
  }
}
