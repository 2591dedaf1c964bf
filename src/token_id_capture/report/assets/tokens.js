// Tokens as text that is drawn only while it is near the window, however long it is.

const CHUNK = 400;

/** Fills elements when they come near a scroller's window, and empties them when they are far away again. */
class Near {
  constructor(scroller) {
    this.jobs = new WeakMap();
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const job = this.jobs.get(target);
        if (job && isIntersecting !== job.filled) this.change(target, job, isIntersecting);
      }
    }, { root: scroller, rootMargin: "1200px 0px" });
  }

  /** `height` is a guess in pixels; without `empty` what was filled stays. */
  add(element, height, fill, empty = null) {
    element.style.height = `${Math.ceil(height)}px`;
    this.jobs.set(element, { fill, empty, filled: false });
    this.observer.observe(element);
    return element;
  }

  change(element, job, near) {
    if (near) {
      job.filled = true;
      element.style.height = "";
      job.fill(element);
      if (!job.empty) this.forget(element);
    } else if (job.empty) {
      job.filled = false;
      element.style.height = `${element.offsetHeight}px`;
      job.empty(element);
    }
  }

  /** Fill it now, because something in it is asked for. */
  fill(element) {
    const job = this.jobs.get(element);
    if (job && !job.filled) this.change(element, job, true);
  }

  forget(element) {
    this.observer.unobserve(element);
    this.jobs.delete(element);
  }
}

/** Draws stretches of runs into elements of one scroller. */
class TokenText {
  constructor(scroller) {
    this.near = new Near(scroller);
    this.chunks = new WeakMap();
    this.hits = new Map();
    this.scroller = scroller;
    this.columns = 80;
  }

  measure(element) {
    const probe = el("span", { class: "text probe" }, "0".repeat(100));
    element.append(probe);
    this.characterWidth = probe.getBoundingClientRect().width / 100;
    this.lineHeight = parseFloat(getComputedStyle(probe).lineHeight);
    probe.remove();
  }

  /** Where to cut a long run: behind a line's end where there is one, never inside of a character. */
  cuts(run, from, to) {
    const { texts } = run.rollout, cuts = [from];
    for (let at = from + CHUNK; at < to; at += CHUNK) {
      let cut = at;
      if (texts) {
        while (cut < Math.min(to, at + CHUNK / 2) && !String(texts[run.ids[cut - 1]]).endsWith("\n")) cut++;
        while (cut < to && Array.isArray(texts[run.ids[cut]])) cut++;
      }
      if (cut >= to) break;
      cuts.push(cut);
      at = cut;
    }
    return [...cuts, to];
  }

  guess(run, from, to, width) {
    const columns = Math.max(20, width / this.characterWidth);
    const { texts } = run.rollout;
    let lines = 1, column = 0;
    for (let i = from; i < to; i++) {
      const piece = texts ? texts[run.ids[i]] ?? "" : run.ids[i];
      const text = typeof piece === "string" ? piece : texts ? "?" : `${piece} `;
      const lastLine = text.lastIndexOf("\n");
      if (lastLine >= 0) {
        for (const character of text) lines += character === "\n";
        column = text.length - lastLine - 1;
      } else if ((column += text.length) > columns) {
        lines += Math.floor(column / columns);
        column %= columns;
      }
    }
    return lines * this.lineHeight + 2;
  }

  /** Elements for the tokens of a run from one index up to another. */
  elements(run, from, to, width) {
    const cuts = this.cuts(run, from, to);
    return cuts.slice(0, -1).map((first, i) => {
      const chunk = el("div", { class: `text ${run.kind}` });
      const last = cuts[i + 1];
      this.chunks.set(chunk, { run, from: first, to: last });
      const fill = () => chunk.replaceChildren(...this.spans(run, first, last, i === 0));
      if (to - from <= 60) {
        fill();
        return chunk;
      }
      return this.near.add(chunk, this.guess(run, first, last, width), fill, () => chunk.replaceChildren());
    });
  }

  spans(run, from, to, begins) {
    const hits = this.hits.get(run.key) ?? [];
    const numbers = !run.rollout.texts;
    return run.pieces(from, to).map((piece, i) => {
      const index = from + i, span = document.createElement("span");
      let text = visible(piece);
      if (run.logProbs) {
        span.className = `s p${shadeOf(run.logProbs[index])}`;
        // What was sampled can be seen, line ends too.
        text = text.replaceAll("\n", "↵\n");
      } else if (begins && i === 0 && !text.trim()) text = text.replaceAll("\n", "↵");
      if (numbers) {
        span.classList.add("id");
        text += " ";
      }
      if (hits.length && hits.some(([a, b]) => index >= a && index < b)) span.classList.add("hit");
      span.textContent = text;
      return span;
    });
  }

  /** The run and index of the token that an element of the page shows; null if it shows none. */
  tokenAt(element) {
    const chunk = element.parentElement, known = chunk && this.chunks.get(chunk);
    if (!known) return null;
    return { run: known.run, index: known.from + Array.prototype.indexOf.call(chunk.childNodes, element) };
  }

  /** The element of a token inside of a container whose chunks are there already. */
  spanOf(container, run, index) {
    for (const chunk of container.querySelectorAll(".text")) {
      const known = this.chunks.get(chunk);
      if (known?.run === run && index >= known.from && index < known.to) {
        this.near.fill(chunk);
        return chunk.childNodes[index - known.from];
      }
    }
    return null;
  }

  redrawHits(container) {
    for (const chunk of container.querySelectorAll(".text")) {
      const known = this.chunks.get(chunk);
      if (!known || !chunk.firstChild) continue;
      const hits = this.hits.get(known.run.key) ?? [];
      chunk.childNodes.forEach((span, i) => {
        const index = known.from + i;
        span.classList.toggle("hit", hits.some(([a, b]) => index >= a && index < b));
      });
    }
  }
}
