// All rollouts together: numbers that matter, bars over time, distributions, and the reasons.

const SERIES = { delivered: "delivered", masked: "masked", failed: "failed", "captured, not delivered": "rest", "no outcome": "rest", rollouts: "other" };
const PLOT_HEIGHT = 132;

class Overview {
  constructor(root, onRollout, onReason) {
    Object.assign(this, { root, onRollout, onReason });
  }

  show(data, database) {
    const top = this.root.scrollTop;
    this.root.replaceChildren(
      el("header", {}, el("h1", {}, database), el("p", { class: "quiet" }, data.summary)),
      el("ul", { class: "tiles" }, data.tiles.map((tile) => el("li", {}, el("strong", {}, tile.value), el("span", {}, tile.label), el("span", { class: "quiet" }, tile.note)))),
      el("div", { class: "plots" }, data.plots.map((plot) => this.plot(plot))),
      ...(data.reasons.length ? [this.bars("Why rollouts were masked or failed", "", data.reasons, true)] : []),
      ...(data.flags.length ? [this.bars("What made rollouts incomplete", "Flags of rollouts that are still in the file.", data.flags, false)] : []),
      ...(data.kept.length ? [this.kept(data)] : []),
    );
    this.root.scrollTop = top;
  }

  plot({ title, unit, labels, series, note, time }) {
    const totals = labels.map((_, i) => series.reduce((sum, one) => sum + one.values[i], 0));
    const top = niceTop(Math.max(1, ...totals)), pitch = 100 / labels.length, width = Math.min(pitch * 0.82, 9);
    const named = series.map((one, i) => [one, SERIES[one.name] ?? `c${i}`]).filter(([one]) => one.values.some(Boolean));
    const bars = labels.map((label, i) => {
      let base = PLOT_HEIGHT;
      const x = `${i * pitch + (pitch - width) / 2}%`;
      const parts = named.filter(([one]) => one.values[i]).map(([one, kind]) => {
        const height = Math.max(1.5, (PLOT_HEIGHT * one.values[i]) / top);
        base -= height;
        return el("rect", { class: `fill-${kind}`, x, width: `${width}%`, y: base, height: Math.max(1, height - 0.75) });
      });
      const told = named.map(([one]) => `${words(one.name)} ${format.format(one.values[i])}`).join(", ");
      return el("g", {}, el("title", {}, `${label}: ${told || "none"}`), el("rect", { class: "hit-area", x: `${i * pitch}%`, width: `${pitch}%`, y: 0, height: PLOT_HEIGHT }), parts);
    });
    const longest = Math.max(...labels.map((label) => label.length));
    const every = Math.max(1, Math.ceil((labels.length * longest) / 34));
    const ticks = labels.flatMap((label, i) => (i % every || (time && i * pitch > 92) ? [] : [el("text", { x: `${(i + 0.5) * pitch}%`, y: PLOT_HEIGHT + 14, "text-anchor": "middle" }, label)]));
    const grid = [0, 0.5, 1].map((part) => el("line", { class: "grid", x1: "0%", x2: "100%", y1: PLOT_HEIGHT * part, y2: PLOT_HEIGHT * part }));
    const sum = named.map(([one]) => `${one.name} ${one.values.reduce((total, value) => total + value, 0)}`).join(", ");
    return el("figure", {},
      el("figcaption", {}, el("h2", {}, title),
        el("span", { class: "keys" }, named.map(([one, kind]) => el("span", {}, el("i", { class: `fill-${kind}` }), words(one.name)))),
        note && el("span", { class: "quiet" }, note)),
      el("div", { class: "plot" },
        el("div", { class: "scale", "aria-hidden": "true" }, el("span", {}, short(top)), el("span", {}, short(top / 2)), el("span", {}, "0")),
        el("svg", { width: "100%", height: PLOT_HEIGHT + 18, role: "img", "aria-label": `${title}, ${unit}: ${sum}` }, grid, bars, ticks)));
  }

  bars(title, note, bars, links) {
    const most = Math.max(...bars.map((bar) => bar.count));
    return el("section", {}, el("h2", {}, title), note && el("p", { class: "quiet" }, note), el("ol", { class: "reasons" }, bars.map((bar) => {
      const fill = el("i", { class: "fill-masked" });
      fill.style.width = `${(100 * bar.count) / most}%`;
      const name = links && this.onReason ? el("a", { href: "#", click: (event) => { event.preventDefault(); this.onReason(bar.reason); } }, words(bar.reason)) : el("b", {}, words(bar.reason));
      return el("li", {}, el("div", {}, name, " ", el("span", { class: "number" }, format.format(bar.count)), " ", el("span", { class: "quiet" }, words(bar.note))), el("span", { class: "track" }, fill), el("p", { class: "quiet" }, bar.what));
    })));
  }

  kept(data) {
    const more = data.more_kept ? " There are more; tokcap ls --masked lists all." : "";
    return el("section", {}, el("h2", {}, "Kept evidence"),
      el("p", { class: "quiet" }, `The latest masked and failed rollouts whose captures can be looked into.${more}`),
      el("table", {}, el("thead", {}, el("tr", {}, ["rollout", "outcome", "reason", "when (UTC)"].map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, data.kept.map((one) => el("tr", {}, el("td", {}, this.link(one.rollout_id)), el("td", {}, one.outcome), el("td", {}, words(one.reason || "–")), el("td", {}, when(one.recorded_at).slice(0, 19)))))));
  }

  link(id) {
    return this.onRollout ? el("a", { href: `#${id}`, click: (event) => { event.preventDefault(); this.onRollout(id); } }, id) : id;
  }
}

/** The next number that halves into a round one. */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const digit = [1, 2, 4, 6, 8, 10].find((one) => one * power >= value);
  return Math.max(2, digit * power);
}
