// The calls of a rollout as a tree beside a timeline: a row a call, lanes for sequences, a bar from intent to durable.

const ROW = 24, LANE = 11, MOST_LANES = 10;

/** Lanes of calls: chains of first children side by side, each in the lowest lane that is free for as long as it lasts. */
function layLanes(calls) {
  const rowOf = new Map(calls.map((call, row) => [call.number, row]));
  const heir = new Map();
  for (const call of calls) {
    if (!call.parent) continue;
    const known = heir.get(call.parent);
    if (known === undefined || (calls[rowOf.get(known)].role !== "main" && call.role === "main")) heir.set(call.parent, call.number);
  }
  const chains = [];
  for (const call of calls) {
    if (call.parent && heir.get(call.parent) === call.number) continue;
    const chain = { rows: [], from: call.parent ?? (call.divergence ? call.base : call.same_as), dashed: !call.parent };
    for (let number = call.number; number !== undefined; number = heir.get(number)) chain.rows.push(rowOf.get(number));
    chain.start = Math.min(chain.from ? rowOf.get(chain.from) : chain.rows[0], chain.rows[0]);
    chain.end = Math.max(...[chain.rows[0], chain.rows.at(-1)]);
    chains.push(chain);
  }
  const isMain = (chain) => calls[chain.rows[0]].role === "main";
  chains.sort((a, b) => isMain(b) - isMain(a) || a.start - b.start || b.end - a.end);
  const free = [], laneOf = new Array(calls.length).fill(0);
  for (const chain of chains) {
    let lane = free.findIndex((taken) => taken.every(([start, end]) => end < chain.start || start > chain.end));
    if (lane < 0) lane = free.push([]) - 1;
    free[lane].push([chain.start, chain.end]);
    chain.lane = Math.min(lane, MOST_LANES - 1);
    for (const row of chain.rows) laneOf[row] = chain.lane;
  }
  return { laneOf, marks: laneMarks(chains, calls, rowOf, laneOf), lanes: Math.min(free.length, MOST_LANES) };
}

/** The lines of each row: `[path, dashed]`, relative to the row. */
function laneMarks(chains, calls, rowOf, laneOf) {
  const marks = calls.map(() => []), middle = ROW / 2, x = (lane) => 9 + lane * LANE;
  for (const chain of chains) {
    const own = new Set(chain.rows), at = x(chain.lane), first = chain.rows[0], begins = chain.from ? rowOf.get(chain.from) : first;
    if (chain.from) {
      const source = x(laneOf[begins]);
      if (begins < first) marks[begins].push([`M${source} ${middle}C${source} ${ROW} ${at} ${middle} ${at} ${ROW}`, chain.dashed]);
    }
    for (let row = Math.min(begins, first) + 1; row <= chain.end; row++) {
      const dashed = chain.dashed && row <= first;
      const path = own.has(row) ? (row === chain.end ? `M${at} 0V${middle}` : row === first && begins >= first ? `M${at} ${middle}V${ROW}` : `M${at} 0V${ROW}`) : `M${at} 0V${ROW}`;
      marks[row].push([path, dashed]);
    }
    if (begins >= first && chain.end > first) marks[first].push([`M${at} ${middle}V${ROW}`, false]);
  }
  return marks;
}

class Outline {
  constructor(root, onCall) {
    this.onCall = onCall;
    this.axis = el("div", { class: "axis" });
    this.scroller = el("div", { class: "scroller", tabindex: 0, role: "listbox", "aria-label": "Calls: which continues which, and when" });
    root.append(this.axis, this.scroller);
    this.rows = new Rows(this.scroller, ROW, (i) => this.row(i));
    this.scroller.addEventListener("click", (event) => {
      const row = event.target.closest("[data-call]");
      if (row) onCall(Number(row.dataset.call));
    });
  }

  show(rollout) {
    this.rollout = rollout;
    this.lanes = layLanes(rollout.calls);
    this.place = new Map(rollout.calls.map((call, row) => [call.number, row]));
    // Calls without tokens stand behind those that were stored before they began.
    this.items = rollout.calls.map((call) => ({ call, at: call.stored_at ?? call.created_at ?? 0 }));
    this.lost = rollout.intents.map((intent) => ({ intent, at: intent.begun_at })).sort((a, b) => a.at - b.at);
    this.setTime();
    this.drawAxis();
    this.rows.show(this.items.length + this.lost.length);
  }

  setTime() {
    const { rollout } = this, times = [];
    for (const call of rollout.calls) times.push(...this.span(call));
    times.push(...rollout.intents.map((intent) => intent.begun_at), ...this.events().map((event) => event.at));
    const known = times.filter(Boolean);
    this.start = known.reduce((least, time) => Math.min(least, time), known[0] ?? rollout.opened_at);
    this.end = known.reduce((most, time) => Math.max(most, time), this.start);
  }

  span(call) {
    const end = call.stored_at ?? call.created_at, begin = call.begun_at ?? call.created_at ?? end;
    return [Math.min(begin, end), end];
  }

  events() {
    const { rollout } = this;
    return [
      { at: rollout.frozen_at, kind: "state", title: "frozen" },
      { at: rollout.retired_at, kind: "state", title: "retired" },
      ...rollout.outcomes.map((one) => ({ at: one.recorded_at, kind: one.outcome === "delivered" ? "good" : "bad", title: `${one.outcome} ${one.reason}` })),
      ...rollout.flags.map((flag) => ({ at: flag.flagged_at, kind: "bad", title: `flag ${flag.reason} ${flag.detail}` })),
      ...rollout.late_writes.map((late) => ({ at: late.attempted_at, kind: "bad", title: `call ${late.model_call_id} came too late` })),
    ].filter((event) => event.at);
  }

  x(time) {
    return this.end > this.start ? (100 * (time - this.start)) / (this.end - this.start) : 0;
  }

  drawAxis() {
    const marks = this.events().map((event) =>
      el("rect", { class: `event ${event.kind}`, x: `${this.x(event.at)}%`, y: 3, width: 3, height: 14, rx: 1 }, el("title", {}, `${event.title}, ${when(event.at)} UTC`)));
    const svg = el("svg", { class: "bars", width: "100%", height: 20 }, marks);
    this.axis.replaceChildren(
      el("span", { class: "quiet" }, count(this.items.length, "call"), this.lost.length > 0 && `, ${format.format(this.lost.length)} without tokens`),
      el("span", { class: "quiet time", title: `from ${when(this.start)} to ${when(this.end)} UTC` }, duration(this.end - this.start)),
      svg);
  }

  row(i) {
    return i < this.items.length ? this.callRow(this.items[i].call, i) : this.lostRow(this.lost[i - this.items.length].intent);
  }

  callRow(call, i) {
    const { laneOf, marks, lanes } = this.lanes, width = 9 + lanes * LANE, [begin, end] = this.span(call);
    const graph = el("svg", { class: "graph", width, height: ROW, "aria-hidden": "true" },
      marks[i].map(([d, dashed]) => el("path", { d, class: dashed ? "edge dashed" : "edge" })),
      el("circle", { class: `node ${call.role}`, cx: 9 + laneOf[i] * LANE, cy: ROW / 2, r: 4.5 }),
      call.flags.length && el("circle", { class: "flagged", cx: 9 + laneOf[i] * LANE, cy: ROW / 2, r: 7.5 }));
    const title = `Call ${call.number}: ${ROLES[call.role]}; ${call.begun_at ? `begun ${when(call.begun_at)}, ` : ""}made ${when(call.created_at)}, durable ${when(call.stored_at)} UTC`;
    return el("div", { class: `row${this.selected === call.number ? " chosen" : ""}`, "data-call": call.number, role: "option", "aria-selected": this.selected === call.number ? "true" : "false", title },
      graph,
      el("b", {}, String(call.number)),
      el("span", { class: "who" }, call.agent ? el("i", { class: this.rollout.agentClass(call.agent) }) : null, call.agent ?? "", call.purpose && call.purpose !== "turn" ? ` ${call.purpose}` : ""),
      el("span", { class: "size" }, `+${short(call.added)} → ${short(call.sampled)}`),
      this.bar(begin, end, call.role));
  }

  lostRow(intent) {
    const what = intent.outcome ?? (this.rollout.state === "open" ? "running" : "lost");
    return el("div", { class: `row ${what}`, title: `Call ${intent.model_call_id}: begun ${when(intent.begun_at)} UTC by process ${intent.writer_pid} on ${intent.writer_host}. ${intent.detail}` },
      el("svg", { class: "graph", width: 9 + this.lanes.lanes * LANE, height: ROW }, el("circle", { class: "node lost", cx: 9, cy: ROW / 2, r: 4.5 })),
      el("b", {}, "–"),
      el("span", { class: "who" }, el("span", { class: what === "running" ? "running" : "bad" }, what), ` ${intent.origin.agent ?? ""} ${intent.model_call_id}`),
      el("span", { class: "size" }),
      this.bar(intent.begun_at, this.rollout.state === "open" && !intent.outcome ? this.end : intent.begun_at, "lost"));
  }

  bar(begin, end, kind) {
    const x = this.x(begin), width = Math.max(0, this.x(end) - x);
    return el("svg", { class: "bars", width: "100%", height: ROW, "aria-hidden": "true" },
      el("line", { class: "grid", x1: "0%", x2: "100%", y1: ROW / 2, y2: ROW / 2 }),
      el("rect", { class: `bar ${kind}`, x: `${Math.min(x, 98)}%`, y: 7, width: `${Math.max(width, 2)}%`, height: 10, rx: 2 }));
  }

  select(number, bring = true) {
    this.selected = number;
    const row = this.place?.get(number);
    if (row === undefined) return;
    if (bring) this.rows.bringIntoView(row);
    else this.rows.redraw();
  }
}
