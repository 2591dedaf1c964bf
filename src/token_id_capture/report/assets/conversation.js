// One rollout as a conversation: each call with what it adds, in the order in which the calls were stored.

const FOLDED = new Set(["tool", "tool_call"]);
const LONG_SYSTEM = 300;
const OPENING = 12;
const PART_NAMES = { system: "system", user: "user", assistant: "assistant", tool: "tool result", reasoning: "reasoning", tool_call: "tool call", prompt: "prompt", continued: "" };

class Conversation {
  constructor(scroller, onSelect) {
    this.scroller = scroller;
    this.onSelect = onSelect;
    this.body = el("div", { class: "calls" });
    this.articles = new Map();
    scroller.append(this.body);
    this.tip = el("div", { id: "tip", hidden: true });
    document.body.append(this.tip);
    scroller.addEventListener("click", (event) => this.click(event));
    scroller.addEventListener("pointermove", (event) => this.point(event));
    scroller.addEventListener("pointerleave", () => (this.tip.hidden = true));
    scroller.addEventListener("scroll", () => this.scrolled(), { passive: true });
  }

  /** Show the calls of one sequence, or all if `numbers` is null. Parts of the same rollout stay open. */
  show(rollout, numbers = null) {
    if (this.rollout?.id !== rollout.id) this.opened = new Set();
    const run = this.rollout?.id === rollout.id && this.selected && rollout.call(this.selected.run.call.number)?.runs[this.selected.run.kind];
    this.selected = run ? { run, index: this.selected.index } : null;
    this.rollout = rollout;
    this.tokens = new TokenText(this.scroller);
    this.tokens.measure(this.scroller);
    this.articles.clear();
    this.selectedSpan = null;
    this.shown = (numbers ?? rollout.calls.map((call) => call.number)).map((number) => rollout.call(number));
    const width = this.scroller.clientWidth - 130;
    this.body.replaceChildren(...this.shown.map((call, place) => {
      const article = el("article", { class: `call ${call.role}`, id: `call-${call.number}`, tabindex: -1, "aria-label": `Call ${call.number}` });
      this.articles.set(call.number, article);
      return this.tokens.near.add(article, this.guess(call, width), () => this.fill(article, call, this.shown[place - 1]));
    }));
  }

  /** Which call is read, and how far it is above the window; `return` puts it there again after `show`. */
  place() {
    const number = this.current(), article = this.articles.get(number);
    const drawn = [...this.articles].filter(([, one]) => one.childElementCount).map(([one]) => one);
    return { number, drawn, offset: article ? this.scroller.scrollTop - article.offsetTop : this.scroller.scrollTop };
  }

  return({ number, drawn, offset }) {
    // Drawn now, so that their heights are known.
    for (const one of drawn) if (this.articles.has(one)) this.tokens.near.fill(this.articles.get(one));
    const jump = () => (this.scroller.scrollTop = (this.articles.get(number)?.offsetTop ?? 0) + offset);
    jump();
    const at = this.scroller.scrollTop;
    // Once more when the rest is drawn, if nobody has scrolled meanwhile.
    requestAnimationFrame(() => this.scroller.scrollTop === at && jump());
  }

  guess(call, width) {
    const size = (run) => (run.length ? Math.ceil((run.length * (this.rollout.texts ? 4 : 7) * this.tokens.characterWidth) / width) * this.tokens.lineHeight : 0);
    return 90 + Math.min(20000, size(call.runs.prompt)) + size(call.runs.answer);
  }

  fill(article, call, before) {
    const width = this.scroller.clientWidth - 130;
    article.replaceChildren(
      this.head(call),
      ...(call.divergence ? [new Diff(this.rollout, call, this.tokens, width).card()] : []),
      ...this.prompt(call, before, width),
      ...this.answer(call, width),
    );
  }

  head(call) {
    const link = (number) => el("a", { href: `#call-${number}`, "data-call": number }, `call ${number}`);
    const continues = call.parent ? ["continues ", link(call.parent)] : call.number > 1 ? ["begins anew"] : [];
    const next = call.children.filter((number) => number !== call.number + 1 || call.children.length > 1);
    return el("header", {},
      el("h3", {}, el("a", { href: `#call-${call.number}`, "data-call": call.number }, `Call ${call.number}`)),
      call.agent && el("span", { class: this.rollout.agentClass(call.agent) }, call.agent),
      call.purpose && el("span", { class: "chip" }, call.purpose),
      call.role !== "main" && el("span", { class: "chip warn" }, ROLES[call.role]),
      call.flags.map((flag) => el("span", { class: "chip bad" }, flag)),
      call.continuity && el("span", { class: "chip" }, `continuity: ${call.continuity}`),
      el("span", { class: "quiet" }, continues, next.length ? [continues.length ? ", " : "", "continued by ", next.slice(0, 6).flatMap((number, i) => [i ? ", " : "", link(number)]), next.length > 6 ? " …" : ""] : []),
      el("span", { class: "numbers" }, `+${format.format(call.added)} prompt · ${format.format(call.sampled)} sampled`, call.mean !== null && ` · mean p ${percent(Math.exp(call.mean))}`, call.finish_reason && ` · ${call.finish_reason}`));
  }

  prompt(call, before, width) {
    if (!call.embedded) return [el("p", { class: "bar" }, `${count(call.added, "prompt token")} and ${count(call.sampled, "sampled token")} are too many for this page`)];
    const found = [], run = call.runs.prompt;
    let added = 0;
    call.steps.forEach(([from, copied, put], i) => {
      const flows = i === 0 && before && before.number === call.base && from === 0 && copied === before.prompt + before.sampled;
      if (copied && !flows) found.push(this.shared(call, from, copied, width));
      if (put) found.push(...this.parts(run, added, added + put, call.segments, copied ? "continued" : "prompt", width));
      added += put;
    });
    return found;
  }

  /** What a call has in common with the one that it builds on: a line, and its tokens on request. */
  shared(call, from, copied, width) {
    const place = from ? `tokens ${format.format(from + 1)} to ${format.format(from + copied)}` : `the first ${count(copied, "token")}`;
    const details = el("details", { class: "shared" }, el("summary", {}, `${place} of `, el("a", { href: `#call-${call.base}`, "data-call": call.base }, `call ${call.base}`)));
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) {
        const stretches = this.rollout.stretches(call.base, from, from + copied);
        details.append(el("div", { class: "body" }, stretches.flatMap(({ run, from, to }) => this.tokens.elements(run, from, to, width))));
      }
    });
    return details;
  }

  /** The parts of a run between two indices, each labelled, tool calls and results folded. */
  parts(run, from, to, segments, first, width) {
    const starts = [[from, first]];
    for (const [at, part] of segments) {
      if (at < from || at >= to) continue;
      // What only ends a message belongs to the message beside it.
      if (at - starts.at(-1)[0] <= 3 && starts.length === 1) starts[0] = [from, part];
      else if (part !== "assistant" || to - at > (FOLDED.has(starts.at(-1)[1]) ? OPENING : 2)) starts.push([at, part]);
    }
    return starts.map(([at, part], i) => this.part(run, at, starts[i + 1]?.[0] ?? to, part, width));
  }

  part(run, from, to, part, width) {
    const size = to - from;
    // The words that open an answer belong to it, and need no label of their own.
    const opening = run.kind === "prompt" && part === "assistant" && size <= OPENING;
    const label = opening ? "" : PART_NAMES[part] ?? part;
    const long = (part === "system" && size > LONG_SYSTEM) || (!this.rollout.texts && run.kind === "prompt" && size > 64);
    if (!FOLDED.has(part) && !long) {
      return el("div", { class: `part ${part} ${run.kind}` }, el("div", { class: "label" }, label), el("div", { class: "body" }, this.tokens.elements(run, from, to, width)));
    }
    const details = el("details", { class: `part ${part} ${run.kind}` },
      el("summary", {}, el("span", { class: "label" }, label || "prompt"), el("span", { class: "preview" }, this.preview(run, from, to)), el("span", { class: "quiet" }, count(size, "token"))));
    const open = () => {
      if (details.childElementCount === 1) details.append(el("div", { class: "body" }, this.tokens.elements(run, from, to, width)));
    };
    const key = `${run.key}/${from}`;
    details.addEventListener("toggle", () => {
      this.opened[details.open ? "add" : "delete"](key);
      if (details.open) open();
    });
    folded.set(details, { run, from, to, open });
    if (this.opened.has(key)) {
      open();
      details.open = true;
    }
    return details;
  }

  /** The beginning of a folded part without the words of the template. */
  preview(run, from, to) {
    const text = run.pieces(from, Math.min(to, from + 60)).join(this.rollout.texts ? "" : " ");
    return text.replace(/<[|｜]?[^<>]{1,24}>((user|tool)\n)?/g, " ").replace(/\s+/g, " ").trim().slice(0, 160);
  }

  answer(call, width) {
    const said = call.said.map((one, place) => this.said(one, place));
    const run = call.runs.answer;
    const tokens = run.length ? this.parts(run, 0, run.length, call.answer, this.rollout.texts ? "assistant" : "sampled", width) : [];
    if (!call.sampled) tokens.push(el("p", { class: "bar" }, "nothing was sampled"));
    // With a tokenizer the tokens are the text; what the engine parsed of it follows.
    return this.rollout.texts ? [...tokens, ...said] : [...said, ...tokens];
  }

  said({ part, text, name }, place) {
    if (part === "tool_call") {
      return el("details", { class: "part said tool_call", "data-said": place },
        el("summary", {}, el("span", { class: "label" }, this.rollout.texts ? "parsed" : "tool call"), el("span", { class: "preview" }, el("b", {}, name), ` ${text}`)),
        el("div", { class: "body" }, el("pre", {}, pretty(text))));
    }
    return el("div", { class: `part said ${part}`, "data-said": place }, el("div", { class: "label" }, PART_NAMES[part]), el("div", { class: "body" }, el("p", { class: "prose" }, text)));
  }

  click(event) {
    const link = event.target.closest("a[data-call]");
    if (link) {
      event.preventDefault();
      this.goToCall(Number(link.dataset.call));
      return;
    }
    const token = this.tokens?.tokenAt(event.target);
    if (token) this.select(token.run, token.index, event.target);
    else {
      const article = event.target.closest("article");
      if (article) this.onSelect(this.rollout.call(Number(article.id.slice(5))), null);
    }
  }

  point(event) {
    const token = this.tokens?.tokenAt(event.target);
    this.tip.hidden = !token;
    if (!token) return;
    this.tip.textContent = visible(this.rollout.factsOf(token.run, token.index).map((pair) => pair.join(": ")).join("\n"));
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, window.innerWidth - width - 8))}px`;
    const below = event.clientY + 20;
    this.tip.style.top = `${below + height > window.innerHeight ? event.clientY - height - 12 : below}px`;
  }

  select(run, index, span) {
    this.selectedSpan?.classList.remove("selected");
    this.selectedSpan = span;
    this.selected = { run, index };
    span?.classList.add("selected");
    this.onSelect(run.call, { run, index });
  }

  /** The number of the call at the top of the window. */
  current() {
    const top = this.scroller.getBoundingClientRect().top + 60;
    let low = 0, high = this.shown.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.articles.get(this.shown[middle].number).getBoundingClientRect().top <= top) low = middle;
      else high = middle - 1;
    }
    return this.shown[low]?.number ?? 0;
  }

  scrolled() {
    this.tip.hidden = true;
    if (this.waiting || !this.shown?.length) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.onScroll?.(this.current());
    });
  }

  isShown(number) {
    return this.articles.has(number);
  }

  goToCall(number) {
    if (!this.isShown(number)) this.onMissing?.(number);
    const article = this.articles.get(number);
    if (!article) return;
    this.tokens.near.fill(article);
    this.settle(() => article.scrollIntoView({ block: "start" }));
    article.focus({ preventScroll: true });
    this.onSelect(this.rollout.call(number), null);
  }

  goToToken(run, index) {
    if (!this.isShown(run.call.number)) this.onMissing?.(run.call.number);
    const article = this.articles.get(run.call.number);
    if (!article) return;
    this.tokens.near.fill(article);
    for (const details of article.querySelectorAll("details")) {
      const known = folded.get(details);
      if (known?.run === run && index >= known.from && index < known.to) {
        known.open();
        details.open = true;
      }
    }
    const span = this.tokens.spanOf(article, run, index);
    if (!span) return;
    this.settle(() => span.isConnected && span.scrollIntoView({ block: "center" }));
    this.select(run, index, span);
  }

  goToSaid(number, place) {
    this.goToCall(number);
    const part = this.articles.get(number)?.querySelector(`[data-said="${place}"]`);
    if (part?.tagName === "DETAILS") part.open = true;
    if (part) this.settle(() => part.scrollIntoView({ block: "center" }));
  }

  /** Heights above are guesses until they are drawn, so a jump is made again once they are. */
  settle(jump) {
    jump();
    requestAnimationFrame(() => {
      jump();
      setTimeout(() => requestAnimationFrame(jump), 60);
    });
  }

  /** The next token behind the selected one that was unlikely, or the one before it. */
  unlikely(step) {
    const at = this.selected?.run.rollout === this.rollout ? this.selected : null;
    let place = at ? this.shown.findIndex((call) => call === at.run.call) : this.shown.findIndex((call) => call.number === this.current());
    let index = at?.run.kind === "answer" ? at.index + step : step > 0 ? 0 : -1;
    for (; place >= 0 && place < this.shown.length; place += step) {
      const run = this.shown[place].runs.answer;
      if (index === Infinity) index = run.length - 1;
      for (; index >= 0 && index < run.length; index += step) if (run.logProbs[index] < UNLIKELY) return this.goToToken(run, index);
      index = step > 0 ? 0 : Infinity;
    }
  }

  /** The token beside the selected one. */
  step(step) {
    if (!this.selected) return false;
    const { run, index } = this.selected;
    if (index + step >= 0 && index + step < run.length) this.goToToken(run, index + step);
    else {
      const other = run.kind === "prompt" && step > 0 ? run.call.runs.answer : run.kind === "answer" && step < 0 ? run.call.runs.prompt : null;
      if (other?.length) this.goToToken(other, step > 0 ? 0 : other.length - 1);
    }
    return true;
  }
}

/** What a folded part holds, by its element. */
const folded = new WeakMap();

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
