// Search in what the calls of a rollout add and sample: in text, or without a tokenizer in ids and in what was said.

class Search {
  constructor(rollout) {
    this.rollout = rollout;
    this.texts = null;
  }

  index() {
    const runs = this.rollout.calls.flatMap((call) => [call.runs.prompt, call.runs.answer]).filter((run) => run.length);
    const joint = this.rollout.texts ? "" : " ";
    this.texts = runs.map((run) => {
      const pieces = run.pieces(0, run.length);
      const starts = new Uint32Array(pieces.length);
      let at = 0;
      pieces.forEach((piece, i) => {
        starts[i] = at;
        at += piece.length + joint.length;
      });
      return { run, starts, text: pieces.join(joint).toLowerCase() };
    });
  }

  /** All places in the order of the calls, 10,000 at most: `{run, from, to}`, or `{call, said}` for a parsed answer. */
  find(query) {
    if (!this.texts) this.index();
    const wanted = query.toLowerCase(), found = [];
    for (const { run, starts, text } of this.texts) {
      for (let at = text.indexOf(wanted); at >= 0 && found.length < 10000; at = text.indexOf(wanted, at + wanted.length)) {
        const from = this.tokenAt(starts, at);
        found.push({ call: run.call.number, run, from, to: this.tokenAt(starts, at + wanted.length - 1) + 1 });
      }
      if (run.kind !== "answer" || this.rollout.texts) continue;
      run.call.said.forEach((said, place) => {
        if (`${said.name} ${said.text}`.toLowerCase().includes(wanted)) found.push({ call: run.call.number, said: place });
      });
    }
    return found;
  }

  tokenAt(starts, at) {
    let low = 0, high = starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= at) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}
