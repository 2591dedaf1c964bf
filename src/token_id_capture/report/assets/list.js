// The rollouts, newest first: searched and filtered, a row each, of which only those in view exist.

const LINE = 46;

class RolloutList {
  /** `source.more(query, before)` gives further lines, or null if all are there already. */
  constructor(root, source, onRollout, onOverview) {
    Object.assign(this, { source, onRollout, lines: [], ended: false });
    this.status = el("span", { class: "live" });
    this.query = el("input", { type: "search", placeholder: "Find rollouts", "aria-label": "Part of a rollout's id or group", autocomplete: "off", spellcheck: "false", input: () => this.later() });
    const select = (name, values) => el("select", { "aria-label": name, change: () => this.load() }, el("option", { value: "" }, `any ${name}`), values.map((value) => el("option", { value }, words(value))));
    this.state = select("state", ["open", "frozen", "retired"]);
    this.outcome = select("outcome", ["delivered", "masked", "failed", "released"]);
    this.reason = select("reason", []);
    this.cause = select("cause", ["retokenization", "dropped_reasoning", "edited_history", "compaction", "sub_agent", "auxiliary", "branch", "retry", "lost_call"]);
    this.order = el("select", { "aria-label": "Order", change: () => this.sort() }, [["", "newest first"], ["turns", "most calls"], ["tokens", "most tokens"], ["reward", "highest reward"], ["low", "lowest reward"], ["group", "by group"]].map(([value, name]) => el("option", { value }, name)));
    this.count = el("span", { class: "quiet" });
    this.overviewButton = el("button", { type: "button", click: onOverview, title: "All rollouts together (o)" }, "Overview");
    this.scroller = el("div", { class: "scroller", tabindex: 0, role: "listbox", "aria-label": "Rollouts" });
    root.append(
      el("div", { class: "listhead" }, el("div", { class: "title" }, this.overviewButton, this.status, this.count), this.query,
        el("div", { class: "filters" }, this.state, this.outcome, this.reason, this.cause, this.order)),
      this.scroller);
    this.rows = new Rows(this.scroller, LINE, (i) => this.row(i));
    this.scroller.addEventListener("scroll", () => this.nearEnd(), { passive: true });
    this.scroller.addEventListener("click", (event) => {
      const row = event.target.closest("[data-id]");
      if (row) onRollout(row.dataset.id);
    });
    this.scroller.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      this.step(step);
    });
  }

  wanted() {
    const wanted = { text: this.query.value.trim(), state: this.state.value, outcome: this.outcome.value, reason: this.reason.value, cause: this.cause.value };
    return Object.fromEntries(Object.entries(wanted).filter(([, value]) => value));
  }

  later() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.load(), 150);
  }

  async load() {
    const asked = (this.asked = Symbol());
    const lines = await this.source.more(this.wanted(), null);
    if (asked !== this.asked) return;
    this.lines = lines;
    this.ended = !lines.more;
    this.scroller.scrollTop = 0;
    this.sort();
  }

  async nearEnd() {
    if (this.ended || this.loading || this.scroller.scrollTop + 3 * this.scroller.clientHeight < this.rows.length * LINE) return;
    this.loading = true;
    const before = Math.min(...this.lines.map((line) => line.number)), asked = this.asked;
    const lines = await this.source.more(this.wanted(), before);
    this.loading = false;
    if (asked !== this.asked) return;
    this.ended = !lines.more;
    this.lines = [...this.lines, ...lines];
    this.sort();
  }

  sort() {
    const keys = { turns: (line) => -(line.calls ?? 0), tokens: (line) => -(line.generated_tokens ?? 0), reward: (line) => -(line.reward ?? -Infinity), low: (line) => line.reward ?? Infinity };
    const key = keys[this.order.value];
    const order = this.order.value === "group" ? (a, b) => a.group.localeCompare(b.group, "en", { numeric: true }) || b.number - a.number : key ? (a, b) => key(a) - key(b) || b.number - a.number : (a, b) => b.number - a.number;
    this.lines.sort(order);
    const reasons = [...new Set(this.lines.map((line) => line.reason).filter(Boolean))].sort();
    const known = new Set([...this.reason.options].map((option) => option.value));
    for (const reason of reasons) if (!known.has(reason)) this.reason.append(el("option", { value: reason }, words(reason)));
    this.count.textContent = `${format.format(this.lines.length)}${this.ended ? "" : "+"}`;
    this.rows.show(this.lines.length);
  }

  /** Lines that are new or have changed; those that the filters do not want go. */
  update(lines) {
    const byId = new Map(this.lines.map((line, i) => [line.id, i])), wanted = this.wanted();
    const gone = new Set();
    for (const line of lines) {
      const fits = matches(line, wanted), at = byId.get(line.id);
      if (at !== undefined && fits) this.lines[at] = line;
      else if (at !== undefined) gone.add(line.id);
      else if (fits && (this.ended || !this.lines.length || line.number > Math.min(...this.lines.map((one) => one.number)))) this.lines.push(line);
    }
    if (gone.size) this.lines = this.lines.filter((line) => !gone.has(line.id));
    this.sort();
  }

  row(i) {
    const line = this.lines[i], chosen = line.id === this.chosen;
    const state = line.state === "open" ? "open" : line.outcome ?? line.state;
    const tone = { delivered: "good", masked: "bad", failed: "bad", open: "running", released: "quiet" }[state] ?? "quiet";
    const why = [words(line.reason), ...line.causes.map(words)].filter(Boolean).join(" · ");
    return el("div", { class: `row entry${chosen ? " chosen" : ""}`, "data-id": line.id, role: "option", "aria-selected": String(chosen), title: `${line.id}\n${why}\nopened ${when(line.opened_at)} UTC${line.group ? `\ngroup ${line.group}` : ""}` },
      el("div", {}, el("b", {}, line.id), line.reward !== null && el("span", { class: "reward" }, Number(line.reward.toPrecision(3)).toString()), el("span", { class: `badge ${tone}` }, state)),
      el("div", { class: "quiet" }, el("span", {}, line.calls === null ? "–" : count(line.calls, "call")), el("span", {}, line.generated_tokens === null ? "" : `${short(line.generated_tokens)} tokens`), line.open_calls > 0 && el("span", { class: line.state === "open" ? "running" : "bad" }, line.state === "open" ? `${format.format(line.open_calls)} running` : `${format.format(line.open_calls)} lost`), line.flags > 0 && el("span", { class: "bad" }, count(line.flags, "flag")), el("span", { class: "why-short" }, why)));
  }

  choose(id) {
    this.chosen = id;
    const place = this.lines.findIndex((line) => line.id === id);
    if (place >= 0) this.rows.bringIntoView(place);
    else this.rows.redraw();
  }

  step(step) {
    const place = this.lines.findIndex((line) => line.id === this.chosen);
    const next = this.lines[Math.max(0, Math.min(this.lines.length - 1, place + step))];
    if (next && next.id !== this.chosen) this.onRollout(next.id);
  }

  filter(reason) {
    if (![...this.reason.options].some((option) => option.value === reason)) this.reason.append(el("option", { value: reason }, words(reason)));
    this.reason.value = reason;
    this.load();
  }
}

function matches(line, wanted) {
  return (!wanted.text || line.id.toLowerCase().includes(wanted.text.toLowerCase())) && (!wanted.state || line.state === wanted.state) && (!wanted.outcome || line.outcome === wanted.outcome) && (!wanted.reason || line.reason === wanted.reason) && (!wanted.cause || line.causes.includes(wanted.cause));
}
