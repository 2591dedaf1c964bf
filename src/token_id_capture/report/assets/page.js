// The page of one rollout: its head, the conversation, the outline of its calls, and what is known of the selection.

class RolloutPage {
  constructor(root) {
    this.head = el("header", { class: "head" });
    this.tools = el("div", { class: "tools" });
    this.scroller = el("div", { class: "conversation", tabindex: 0, role: "region", "aria-label": "Conversation" });
    this.intro = el("div", { class: "intro" });
    this.scroller.append(this.intro);
    this.side = el("aside", { class: "side", "aria-label": "Calls" });
    const outline = el("div", { class: "outline" }), inspector = el("div", { class: "inspector", "aria-live": "polite" });
    this.side.append(outline, inspector);
    root.replaceChildren(el("div", { class: "middle" }, this.head, this.tools, this.scroller), this.side);
    this.conversation = new Conversation(this.scroller, (call, token) => this.selected(call, token));
    this.conversation.onScroll = (number) => this.outline.select(number);
    this.conversation.onMissing = () => this.showSequence(null);
    this.outline = new Outline(outline, (number) => this.conversation.goToCall(number));
    this.inspector = new Inspector(inspector);
    this.hits = [];
    this.hit = -1;
    this.makeTools();
  }

  makeTools() {
    this.query = el("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search in this rollout", autocomplete: "off", spellcheck: "false" });
    this.found = el("output", { class: "quiet" });
    this.sequence = el("select", { "aria-label": "Calls that are shown", change: (event) => this.showSequence(event.target.value === "" ? null : Number(event.target.value)) });
    this.query.addEventListener("input", () => this.search());
    this.query.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.nextHit(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") this.scroller.focus();
    });
    const button = (text, title, action) => el("button", { type: "button", title, click: action }, text);
    this.tools.replaceChildren(
      this.query,
      this.found,
      this.sequence,
      el("span", { class: "buttons" },
        button("↑ call", "Previous call (k)", () => this.stepCall(-1)),
        button("↓ call", "Next call (j)", () => this.stepCall(1)),
        button("↓ unlikely", "Next sampled token of less than 1 % (n)", () => this.conversation.unlikely(1)),
        button("↓ divergence", "Next place where a history diverges (d)", () => this.nextDivergence())),
      el("span", { class: "legend", "aria-label": "Colours of sampled tokens" }, SHADES.map(([name, long], i) => el("span", { class: `s p${i + 1}`, title: `sampled with a probability of ${long}` }, name))));
  }

  show(data, keep = false) {
    const place = keep ? this.conversation.place() : null, chosen = this.sequence.value;
    this.rollout = new Rollout(data);
    this.makeHead();
    this.sequence.replaceChildren(el("option", { value: "" }, `All ${count(this.rollout.calls.length, "call")}`), ...this.rollout.sequences.map((one, i) => el("option", { value: i }, one.name)));
    this.sequence.hidden = this.rollout.sequences.length < 2;
    const sequence = keep && chosen !== "" && this.rollout.sequences[chosen] ? Number(chosen) : null;
    this.outline.show(this.rollout);
    this.searcher = new Search(this.rollout);
    this.showSequence(sequence);
    if (keep) {
      this.conversation.return(place);
      if (this.query.value) this.search(false);
      const { selected } = this.conversation;
      this.inspector.show(this.rollout, this.chosen ? this.rollout.call(this.chosen) : null, selected?.run.call.number === this.chosen ? selected : null);
    } else {
      this.query.value = "";
      this.found.textContent = "";
      this.scroller.scrollTop = 0;
      this.chosen = null;
      this.outline.select(null);
      this.inspector.show(this.rollout, null, null);
    }
  }

  showSequence(index) {
    this.sequence.value = index === null ? "" : String(index);
    this.conversation.show(this.rollout, index === null ? null : this.rollout.sequences[index].calls);
    this.conversation.tokens.hits = this.hitsByRun();
  }

  makeHead() {
    const { rollout } = this;
    this.head.replaceChildren(
      el("h1", {}, rollout.id, " ", el("span", { class: `badge ${rollout.tone}` }, rollout.badge)),
      el("dl", { class: "facts" }, rollout.facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
    const why = rollout.findings.map((finding) => this.finding(finding));
    const notes = rollout.notes.map((note) => el("li", {}, note));
    const records = this.records();
    const open = new Map([...this.intro.querySelectorAll("details")].map((one) => [one.className, one.open]));
    this.intro.replaceChildren(
      el("p", { class: "headline" }, rollout.headline),
      el("p", { class: "quiet" }, rollout.summary),
      ...(why.length || notes.length ? [el("details", { class: "why", open: why.length > 0 && rollout.state !== "open" }, el("summary", {}, "Why, and what to do"), why, notes.length ? el("ul", {}, notes) : null)] : []),
      ...(records ? [records] : []),
      ...(rollout.left_out ? [el("p", { class: "quiet" }, `The tokens of ${count(rollout.left_out, "call")} would make this page too large, and are left out.`)] : []));
    if (this.shown === rollout.id) for (const one of this.intro.querySelectorAll("details")) one.open = open.get(one.className) ?? one.open;
    this.shown = rollout.id;
  }

  finding(finding) {
    const concern = ({ id, number, particulars }) =>
      el("li", {}, number ? el("a", { href: `#call-${number}`, "data-call": number }, `call ${number}`) : id ? el("code", {}, id) : null, particulars && `${id ? ": " : ""}${particulars}`);
    return el("article", { class: "finding" },
      el("h3", {}, words(finding.reason)),
      el("p", {}, finding.what),
      finding.concerns.length ? el("ul", {}, finding.concerns.map(concern), finding.more ? el("li", {}, `and ${format.format(finding.more)} more`) : null) : null,
      finding.remedies.map((remedy) => el("p", { class: "remedy" }, el("b", {}, "What to do: "), remedy)));
  }

  records() {
    const { rollout } = this, tables = [];
    const table = (title, names, rows) => rows.length && tables.push(el("h4", {}, title), el("table", {}, el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value) => el("td", {}, String(value))))))));
    table("Outcomes", ["version", "outcome", "reason", "when"], rollout.outcomes.map((one) => [one.version, one.outcome, one.reason || "–", when(one.recorded_at)]));
    table("Flags", ["reason", "particulars", "call", "when"], rollout.flags.map((flag) => [flag.reason, flag.detail || "–", flag.model_call_id || "–", when(flag.flagged_at)]));
    table("Calls without tokens", ["call", "outcome", "particulars", "begun", "by process", "on host"], rollout.intents.map((one) => [one.model_call_id, one.outcome ?? "never ended", one.detail || "–", when(one.begun_at), one.writer_pid, one.writer_host]));
    table("Late writes", ["call", "refused because it was", "when"], rollout.late_writes.map((late) => [late.model_call_id, late.state, when(late.attempted_at)]));
    return tables.length ? el("details", { class: "records" }, el("summary", {}, "What is recorded"), tables) : null;
  }

  selected(call, token) {
    this.chosen = call.number;
    this.outline.select(call.number);
    this.inspector.show(this.rollout, call, token);
    history.replaceState(null, "", `#${this.rollout.id}/${call.number}`);
  }

  search(jump = true) {
    const query = this.query.value;
    this.hits = query.length ? this.searcher.find(query) : [];
    this.hit = -1;
    this.conversation.tokens.hits = this.hitsByRun();
    this.conversation.tokens.redrawHits(this.scroller);
    this.found.textContent = query ? (this.hits.length ? count(this.hits.length, "place") : "nothing found") : "";
    clearTimeout(this.jumping);
    if (jump && this.hits.length) this.jumping = setTimeout(() => this.nextHit(1), 250);
  }

  hitsByRun() {
    const byRun = new Map();
    for (const { run, from, to } of this.hits) {
      if (!run) continue;
      if (!byRun.has(run.key)) byRun.set(run.key, []);
      byRun.get(run.key).push([from, to]);
    }
    return byRun;
  }

  nextHit(step) {
    clearTimeout(this.jumping);
    if (!this.hits.length) return;
    this.hit = (this.hit + step + this.hits.length) % this.hits.length;
    const hit = this.hits[this.hit];
    if (hit.run) this.conversation.goToToken(hit.run, hit.from);
    else this.conversation.goToSaid(hit.call, hit.said);
    this.found.textContent = `${format.format(this.hit + 1)} of ${format.format(this.hits.length)}`;
    this.query.focus({ preventScroll: true });
  }

  stepCall(step) {
    const { shown } = this.conversation, now = this.conversation.current();
    const place = shown.findIndex((call) => call.number === (this.outline.selected ?? now));
    const next = shown[Math.max(0, Math.min(shown.length - 1, place + step))];
    if (next) this.conversation.goToCall(next.number);
  }

  nextDivergence() {
    const all = this.rollout.calls.filter((call) => call.divergence);
    const next = all.find((call) => call.number > (this.outline.selected ?? 0)) ?? all[0];
    if (next) this.conversation.goToCall(next.number);
  }

  /** What a key does here; false if it does nothing. */
  key(event) {
    const keys = {
      j: () => this.stepCall(1),
      k: () => this.stepCall(-1),
      n: () => this.conversation.unlikely(1),
      p: () => this.conversation.unlikely(-1),
      d: () => this.nextDivergence(),
      "/": () => this.query.focus(),
      ArrowRight: () => this.conversation.step(1),
      ArrowLeft: () => this.conversation.step(-1),
    };
    if (!(event.key in keys)) return false;
    return keys[event.key]() !== false;
  }
}
