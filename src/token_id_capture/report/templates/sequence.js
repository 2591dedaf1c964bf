// The embedded tokens as typed arrays, and one sequence of them.

/** Bytes of a base64 text. */
function decodeBytes(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes.buffer;
}

/** Little-endian numbers; typed arrays are in the machine's own order. */
function decodeNumbers(text, type, read) {
  const buffer = decodeBytes(text);
  if (new Uint8Array(new Uint16Array([1]).buffer)[0] === 1) return new type(buffer);
  const view = new DataView(buffer);
  return type.from({ length: buffer.byteLength / 4 }, (_, i) => view[read](4 * i, true));
}

class TokenData {
  constructor(block) {
    this.ids = decodeNumbers(block.ids, Uint32Array, "getUint32");
    this.logProbs = decodeNumbers(block.logProbs, Float32Array, "getFloat32");
    this.texts = block.texts || null;
    this.sequences = block.sequences;
    let id = 0, logProb = 0;
    this.calls = block.calls.map(([number, context, sampled, callId]) => {
      const call = { number, context, sampled, callId, firstId: id, firstLogProb: logProb };
      id += context + sampled;
      logProb += sampled;
      return call;
    });
  }

  /** The first sequence that a call is part of; -1 if it is in none. */
  sequenceOf(number) {
    return this.sequences.findIndex((calls) => calls.some((index) => this.calls[index].number === number));
  }
}

/** Calls laid end to end. A log probability is NaN where the token is context. */
class TokenSequence {
  constructor(data, index) {
    const calls = data.sequences[index].map((position) => data.calls[position]);
    this.data = data;
    this.length = calls.reduce((sum, call) => sum + call.context + call.sampled, 0);
    this.ids = new Uint32Array(this.length);
    this.logProbs = new Float32Array(this.length).fill(NaN);
    this.parts = [];
    let at = 0;
    for (const call of calls) {
      const sampledAt = at + call.context, end = sampledAt + call.sampled;
      this.ids.set(data.ids.subarray(call.firstId, call.firstId + call.context + call.sampled), at);
      this.logProbs.set(data.logProbs.subarray(call.firstLogProb, call.firstLogProb + call.sampled), sampledAt);
      this.parts.push({ call, start: at, sampledAt, end });
      at = end;
    }
  }

  /** The part that a position lies in. */
  partAt(position) {
    let low = 0, high = this.parts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.parts[middle].start <= position) low = middle;
      else high = middle - 1;
    }
    return this.parts[low];
  }

  isSampled(position) {
    return !Number.isNaN(this.logProbs[position]);
  }

  /** The next sampled token behind a position with less than one percent; -1 if there is none. */
  nextUnlikely(position) {
    for (let i = position + 1; i < this.length; i++) if (this.logProbs[i] < UNLIKELY) return i;
    return -1;
  }

  textOf(id) {
    return this.data.texts ? this.data.texts[id] : undefined;
  }
}
