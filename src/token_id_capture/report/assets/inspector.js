// What is known of the selected token and its call, and how the sampled tokens are distributed.

const BINS = [0, -0.01, -0.1, -0.3, -0.7, -1.5, -3, -4.6, -7, -Infinity];

class Inspector {
  constructor(root) {
    this.root = root;
  }

  show(rollout, call, token) {
    this.root.replaceChildren(
      ...(token ? [this.section("Token", this.list(rollout.factsOf(token.run, token.index)))] : []),
      ...(call ? this.call(call) : []),
      this.section(call ? `Log probabilities of call ${call.number}` : "Log probabilities", this.histogram(call ? call.runs.answer.logProbs : rollout.logProbs)),
    );
  }

  call(call) {
    const times = [["begun", call.begun_at], ["recorded", call.created_at], ["durable", call.stored_at]].filter(([, at]) => at).map(([name, at]) => [name, when(at).slice(0, 23)]);
    const facts = [
      ["id", call.id],
      ["model", call.model || null],
      ["weights", call.weight_version],
      ["agent", call.agent],
      ["started by", call.parent_agent],
      ["purpose", call.purpose],
      ["ended", call.finish_reason],
      ["prompt", count(call.prompt, "token")],
      ["response", call.response_id],
      ["log probabilities", call.log_probs_mode],
      ...times,
    ].filter(([, value]) => value !== null && value !== undefined);
    const sampling = Object.entries(call.sampling).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]);
    return [
      this.section(`Call ${call.number}`, this.list(facts)),
      sampling.length ? this.section("Sampling parameters", this.list(sampling)) : null,
    ].filter(Boolean);
  }

  section(title, ...children) {
    return el("section", {}, el("h3", {}, title), children);
  }

  list(facts) {
    return el("dl", {}, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  histogram(logProbs) {
    if (!logProbs.length) return el("p", { class: "quiet" }, "nothing was sampled");
    const counts = new Array(BINS.length - 1).fill(0);
    for (const value of logProbs) {
      let bin = 0;
      while (bin < counts.length - 1 && value < BINS[bin + 1]) bin++;
      counts[bin]++;
    }
    const most = Math.max(...counts);
    return el("div", { class: "histogram", role: "img", "aria-label": counts.map((number, i) => `${binName(i)}: ${number}`).join(", ") },
      counts.map((number, i) => {
        const fill = el("i", { class: `p${shadeOf((Math.max(BINS[i + 1], -9) + BINS[i]) / 2)}` });
        fill.style.width = `${(100 * number) / most}%`;
        return el("div", { title: `${binName(i)}: ${count(number, "token")}` }, el("span", {}, binName(i)), el("span", { class: "track" }, fill), el("span", { class: "number" }, short(number)));
      }));
  }
}

function binName(i) {
  return BINS[i + 1] === -Infinity ? `below ${BINS[i]}` : `${BINS[i]} to ${BINS[i + 1]}`;
}
