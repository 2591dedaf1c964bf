// Where a prompt does not continue the call that it should: both texts around each difference.

const AROUND = 14;
const MOST_TOKENS = 90;
const MOST_PLACES = 12;

class Diff {
  constructor(rollout, call, tokens, width) {
    Object.assign(this, { rollout, call, tokens, width });
    this.base = rollout.call(call.base);
  }

  card() {
    const { call, base } = this, { divergence } = call;
    const places = this.places();
    return el("section", { class: "diff", "aria-label": `Where call ${call.number} diverges from call ${base.number}` },
      el("h4", {}, `Diverges from `, el("a", { href: `#call-${base.number}`, "data-call": base.number }, `call ${base.number}`), ` at token ${format.format(divergence.position + 1)} of ${format.format(base.prompt + base.sampled)}`,
        divergence.cause && el("span", { class: "chip warn" }, words(divergence.cause))),
      divergence.looks && el("p", {}, divergence.looks),
      el("div", { class: "hunks" }, places.slice(0, MOST_PLACES).map((place) => this.hunk(place))),
      places.length > MOST_PLACES && el("p", { class: "quiet" }, `and ${count(places.length - MOST_PLACES, "more place")}`));
  }

  /** Each difference: what is missing of the old sequence, and what the new prompt has instead. */
  places() {
    const { call, base } = this, found = [];
    let added = 0, position = 0;
    call.steps.forEach(([from, copied, put], i) => {
      const end = from + copied, next = call.steps[i + 1]?.[0] ?? base.prompt + base.sampled;
      position += copied;
      // What only follows the old sequence is no difference.
      if (next > end || (put && next < base.prompt + base.sampled)) found.push({ end, next, added, put, position, last: i === call.steps.length - 1 });
      added += put;
      position += put;
    });
    return found;
  }

  hunk({ end, next, added, put, last }) {
    const { call, base } = this, { prompt } = call.runs;
    const old = this.rollout.stretches(base.number, end, Math.min(next, end + MOST_TOKENS));
    const fresh = put ? [{ run: prompt, from: added, to: Math.min(added + put, added + MOST_TOKENS) }] : [];
    const before = this.rollout.stretches(base.number, Math.max(0, end - AROUND), end);
    const after = last ? [] : this.rollout.stretches(base.number, next, Math.min(next + AROUND, base.prompt + base.sampled));
    const line = (sign, name, stretches, more) =>
      el("div", { class: `line ${name}` }, el("span", { class: "sign" }, sign), el("div", { class: "sides" },
        el("span", { class: "near" }, this.spans(before)),
        stretches.length ? el(name, {}, this.spans(stretches)) : el("span", { class: "quiet" }, sign === "−" ? "(nothing)" : next > end ? "(left out)" : "(the prompt ends)"),
        more > 0 ? el("span", { class: "quiet" }, ` … ${format.format(more)} more`) : el("span", { class: "near" }, this.spans(after))));
    return el("div", { class: "hunk" },
      line("−", "del", old, next - end - MOST_TOKENS),
      line("+", "ins", fresh, put - MOST_TOKENS));
  }

  spans(stretches) {
    return stretches.flatMap(({ run, from, to }) =>
      run.pieces(from, to).map((piece) => this.rollout.texts ? el("span", {}, piece.replaceAll("\n", "↵\n")) : el("span", { class: "id" }, `${piece} `)));
  }
}
