// One rollout: its tokens as typed arrays, and for each call what it adds to the call that it builds on.

const UNLIKELY = Math.log(0.01);
const LIMITS = [0.9, 0.5, 0.2, 0.05, 0.01].map(Math.log);
const SHADES = [["≥ 90 %", "90 % or more"], ["50", "50 to 90 %"], ["20", "20 to 50 %"], ["5", "5 to 20 %"], ["1", "1 to 5 %"], ["< 1 %", "less than 1 %"]];

/** 1 (likely) to 6, by fixed limits, so that pages can be compared. */
function shadeOf(logProb) {
  let shade = 1;
  while (shade <= LIMITS.length && logProb < LIMITS[shade - 1]) shade++;
  return shade;
}

/** Little-endian numbers in base64; typed arrays are in the machine's own order. */
function decodeNumbers(text, type, read) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  if (new Uint8Array(new Uint16Array([1]).buffer)[0] === 1) return new type(bytes.buffer);
  const view = new DataView(bytes.buffer);
  return type.from({ length: bytes.length / 4 }, (_, i) => view[read](4 * i, true));
}

/**
 * A stretch of tokens of one call: what its prompt adds, or what it sampled. `start` is the position of the first one in
 * the call's sequence where it is in one piece; `logProbs` is null for a prompt.
 */
class Run {
  constructor(rollout, call, kind, ids, logProbs) {
    Object.assign(this, { rollout, call, kind, ids, logProbs, key: `${call.number}/${kind}` });
    this.length = ids.length;
  }

  /** Where a token stands in the call's whole sequence. */
  position(index) {
    if (this.kind === "answer") return this.call.prompt + index;
    let at = 0;
    for (const [, copied, added] of this.call.steps) {
      at += copied;
      if (index < added) return at + index;
      index -= added;
      at += added;
    }
    return at + index;
  }

  /** The texts of some tokens; a character that is spread over several appears with the last of them. */
  pieces(from, to) {
    const { texts } = this.rollout;
    if (!texts) return Array.from(this.ids.subarray(from, to), String);
    const decoder = new TextDecoder();
    const found = new Array(to - from);
    for (let i = from; i < to; i++) {
      const piece = texts[this.ids[i]] ?? "";
      const whole = typeof piece === "string";
      found[i - from] = (whole ? decoder.decode() : "") + (whole ? piece : decoder.decode(Uint8Array.from(piece), { stream: true }));
    }
    return found;
  }
}

class Rollout {
  constructor(data) {
    Object.assign(this, data);
    this.texts = data.tokens.texts;
    this.ids = decodeNumbers(data.tokens.ids, Uint32Array, "getUint32");
    this.logProbs = decodeNumbers(data.tokens.log_probs, Float32Array, "getFloat32");
    let id = 0, logProb = 0;
    for (const call of this.calls) {
      const added = call.embedded ? call.steps.reduce((sum, step) => sum + step[2], 0) : 0;
      const sampled = call.embedded ? call.sampled : 0;
      call.added = call.steps.reduce((sum, step) => sum + step[2], 0);
      call.runs = {
        prompt: new Run(this, call, "prompt", this.ids.subarray(id, id + added), null),
        answer: new Run(this, call, "answer", this.ids.subarray(id + added, id + added + sampled), this.logProbs.subarray(logProb, logProb + sampled)),
      };
      call.children = [];
      id += added + sampled;
      logProb += sampled;
    }
    for (const call of this.calls) {
      call.mean = call.runs.answer.length ? call.runs.answer.logProbs.reduce((sum, value) => sum + value, 0) / call.runs.answer.length : null;
      if (call.parent) this.call(call.parent).children.push(call.number);
    }
    this.agents = [...new Set(this.calls.map((call) => call.agent).filter(Boolean))];
  }

  call(number) {
    return this.calls[number - 1];
  }

  /**
   * The stretches of runs that make a call's sequence from one position up to another, each with the tokens that its
   * own call put in or sampled. Nothing is copied, and nothing recurses: chains are deep.
   */
  stretches(number, from, to) {
    const found = [], waiting = [[this.call(number), from, to]];
    const inside = (start, length, first, last) => [Math.max(first, start) - start, Math.min(last, start + length) - start];
    while (waiting.length) {
      const [call, first, last] = waiting.pop();
      if (call.run) {
        found.push({ run: call.run, from: first, to: last });
        continue;
      }
      const parts = [];
      let at = 0, added = 0;
      const part = (owner, start, length, shift) => {
        const [a, b] = inside(start, length, first, last);
        if (a < b) parts.push([owner, shift + a, shift + b]);
      };
      for (const [offset, copied, put] of call.steps) {
        if (copied) part(this.call(call.base), at, copied, offset);
        if (call.embedded) part({ run: call.runs.prompt }, at + copied, put, added);
        at += copied + put;
        added += put;
      }
      if (call.embedded) part({ run: call.runs.answer }, at, call.sampled, 0);
      waiting.push(...parts.reverse());
    }
    return found;
  }

  /** What a page says of one token. */
  factsOf(run, index) {
    const id = run.ids[index], text = this.texts ? this.texts[id] : undefined;
    const facts = [
      ["token", `${format.format(run.position(index) + 1)} of ${format.format(run.call.prompt + run.call.sampled)}`],
      ["id", String(id)],
    ];
    if (text !== undefined) facts.push(["text", typeof text === "string" ? JSON.stringify(text) : `bytes ${text.map((byte) => byte.toString(16)).join(" ")}`]);
    facts.push([run.logProbs ? "sampled by" : "prompt of", `call ${run.call.number}`]);
    if (run.logProbs) {
      facts.push(["log probability", run.logProbs[index].toFixed(4)], ["probability", percent(Math.exp(run.logProbs[index]))]);
    }
    return facts;
  }

  agentClass(agent) {
    return agent ? `agent a${this.agents.indexOf(agent) % 6}` : "agent";
  }
}

const ROLES = {
  main: "main sequence",
  branch: "another sequence",
  retry: "left out: another answer was continued",
  unresolved: "one of several answers, none continued",
  copy: "left out: a copy",
  empty: "left out: nothing sampled",
};
