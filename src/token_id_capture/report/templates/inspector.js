// What is known of a token, in words: for the line below the strip, the tip, screen readers and the table.

const PAGE = 100;
const number = new Intl.NumberFormat("en");

function percent(logProb) {
  const value = 100 * Math.exp(logProb);
  return value >= 0.01 ? `${value.toPrecision(3)} %` : "less than 0.01 %";
}

/** Name and value pairs of a token. */
function tokenFacts(sequence, position) {
  const part = sequence.partAt(position);
  const sampled = sequence.isSampled(position);
  const facts = [["token", `${number.format(position + 1)} of ${number.format(sequence.length)}`], ["id", String(sequence.ids[position])]];
  const text = sequence.textOf(sequence.ids[position]);
  if (text !== undefined) facts.push(["text", JSON.stringify(text)]);
  facts.push([sampled ? "sampled by" : "context of", `call ${part.call.number}`]);
  if (sampled) {
    const logProb = sequence.logProbs[position];
    facts.push(["log probability", logProb.toFixed(4)], ["probability", percent(logProb)]);
  }
  return facts;
}

function sentence(facts) {
  return facts.map(([name, value]) => `${name} ${value}`).join(", ");
}

class Inspector {
  constructor(list, tip) {
    Object.assign(this, { list, tip });
  }

  show(facts) {
    this.list.replaceChildren(
      ...facts.map(([name, value]) => {
        const pair = document.createElement("div");
        pair.append(Object.assign(document.createElement("dt"), { textContent: name }));
        pair.append(Object.assign(document.createElement("dd"), { textContent: value }));
        return pair;
      }),
    );
  }

  point(facts, event) {
    this.tip.textContent = facts.map(([name, value]) => `${name}: ${value}`).join("\n");
    this.tip.hidden = false;
    const { width, height } = this.tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, window.innerWidth - width - 8);
    const below = event.clientY + 18;
    this.tip.style.left = `${Math.max(8, left)}px`;
    this.tip.style.top = `${below + height > window.innerHeight ? event.clientY - height - 10 : below}px`;
  }

  hide() {
    this.tip.hidden = true;
  }
}

/** A hundred tokens at a time. */
class TokenTable {
  constructor(details) {
    this.details = details;
    this.first = 0;
    details.addEventListener("toggle", () => this.draw());
    details.querySelector("#previous-page").addEventListener("click", () => this.turn(-PAGE));
    details.querySelector("#next-page").addEventListener("click", () => this.turn(PAGE));
  }

  show(sequence) {
    this.sequence = sequence;
    this.goTo(0);
  }

  goTo(position) {
    const first = Math.floor(position / PAGE) * PAGE;
    if (first !== this.first || position === 0) {
      this.first = first;
      this.draw();
    }
  }

  turn(step) {
    const first = this.first + step;
    if (first >= 0 && first < this.sequence.length) this.goTo(first);
  }

  draw() {
    if (!this.details.open || !this.sequence) return;
    const last = Math.min(this.sequence.length, this.first + PAGE);
    const withText = Boolean(this.sequence.data.texts);
    this.details.querySelector("caption").textContent =
      `Tokens ${number.format(this.first + 1)} to ${number.format(last)} of ${number.format(this.sequence.length)}`;
    const names = ["token", "id", ...(withText ? ["text"] : []), "call", "in the loss", "log probability", "probability"];
    this.details.querySelector("thead").replaceChildren(this.row("th", names));
    const rows = [];
    for (let i = this.first; i < last; i++) rows.push(this.row("td", this.cells(i, withText)));
    this.details.querySelector("tbody").replaceChildren(...rows);
  }

  cells(position, withText) {
    const { ids, logProbs } = this.sequence;
    const sampled = this.sequence.isSampled(position);
    const text = withText ? [JSON.stringify(this.sequence.textOf(ids[position]) ?? "")] : [];
    const loss = sampled ? ["yes", logProbs[position].toFixed(4), percent(logProbs[position])] : ["no", "–", "–"];
    return [number.format(position + 1), ids[position], ...text, this.sequence.partAt(position).call.number, ...loss];
  }

  row(kind, values) {
    const row = document.createElement("tr");
    values.forEach((value, index) => {
      const head = kind === "th" || index === 0;
      const cell = document.createElement(head ? "th" : "td");
      if (head) cell.scope = kind === "th" ? "col" : "row";
      cell.textContent = String(value);
      row.append(cell);
    });
    return row;
  }
}
