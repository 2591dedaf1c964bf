// Puts the parts together.

const find = (id) => document.getElementById(id);
const data = new TokenData(JSON.parse(find("token-data").textContent));
const strip = new Strip(find("strip"), find("cells"), find("strip-height"));
const map = new SequenceMap(find("map"), strip);
const inspector = new Inspector(find("token"), find("tip"));
const table = new TokenTable(find("token-table"));

function select(position) {
  strip.select(position);
  const facts = tokenFacts(strip.sequence, strip.selected);
  inspector.show(facts);
  inspector.hide();
  table.goTo(strip.selected);
  strip.element.setAttribute("aria-valuenow", strip.selected + 1);
  strip.element.setAttribute("aria-valuetext", sentence(facts));
}

function showSequence(index) {
  const sequence = new TokenSequence(data, index);
  find("sequence").value = String(index);
  strip.element.setAttribute("aria-valuemax", sequence.length);
  strip.show(sequence);
  map.show(sequence);
  table.show(sequence);
  select(0);
}

function showCall(number) {
  const index = data.sequenceOf(number);
  if (index < 0) return;
  const isShown = strip.sequence.parts.some((part) => part.call.number === number);
  if (!isShown) showSequence(index);
  const part = strip.sequence.parts.find((one) => one.call.number === number);
  select(Math.min(part.sampledAt, part.end - 1));
  strip.element.focus();
}

strip.onView = () => map.draw();
strip.element.addEventListener("keydown", (event) => {
  const target = strip.keyTarget(event);
  if (target === null) return;
  event.preventDefault();
  select(target);
});
strip.element.addEventListener("pointermove", (event) => {
  const position = strip.positionAt(event);
  if (position < 0) inspector.hide();
  else inspector.point(tokenFacts(strip.sequence, position), event);
});
strip.element.addEventListener("pointerleave", () => inspector.hide());
strip.element.addEventListener("scroll", () => inspector.hide());
strip.element.addEventListener("click", (event) => {
  const position = strip.positionAt(event);
  if (position >= 0) select(position);
});
find("map").addEventListener("pointerdown", (event) => {
  find("map").setPointerCapture(event.pointerId);
  select(map.positionAt(event));
});
find("map").addEventListener("pointermove", (event) => {
  if (event.buttons) select(map.positionAt(event));
});
find("sequence").addEventListener("change", (event) => showSequence(Number(event.target.value)));
find("previous-call").addEventListener("click", () => select(strip.keyTarget({ shiftKey: true, key: "ArrowLeft" })));
find("next-call").addEventListener("click", () => select(strip.keyTarget({ shiftKey: true, key: "ArrowRight" })));
find("next-unlikely").addEventListener("click", () => select(strip.keyTarget({ key: "n" })));
for (const link of document.querySelectorAll("a[data-call]")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    showCall(Number(link.dataset.call));
    strip.element.scrollIntoView({ block: "center" });
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  strip.palette = currentPalette();
  strip.redraw();
});
showSequence(0);
