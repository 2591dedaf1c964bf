// Puts the parts of the page together: a list where there are many rollouts, the overview, and one rollout.

const data = JSON.parse(find("data").textContent);
const many = data.live || data.overview;
const app = el("main", { id: "app", class: many ? "many" : "" });
const nav = el("nav", { class: "list", "aria-label": "Rollouts" });
const main = el("div", { class: "page" });
const overviewRoot = el("div", { class: "overview", tabindex: 0 });
app.append(...(many ? [nav] : []), overviewRoot, main);
document.body.append(app);

const page = new RolloutPage(main);
const source = data.live ? new Live() : { more: async (wanted) => data.rollouts.filter((line) => matches(line, wanted)) };
const list = many && new RolloutList(nav, source, openRollout, showOverview);
const overview = new Overview(overviewRoot, many && openRollout, many && ((reason) => list.filter(reason)));

function show(part) {
  app.dataset.shows = part;
  overviewRoot.hidden = part !== "overview";
  main.hidden = part !== "rollout";
}

async function openRollout(id) {
  list.choose(id);
  if (!data.live) {
    const line = data.rollouts.find((one) => one.id === id);
    overviewRoot.replaceChildren(el("h1", {}, id), el("p", {}, line ? `${line.state}${line.outcome ? `, ${line.outcome}` : ""} ${words(line.reason)}` : ""), el("p", { class: "quiet" }, "This page has no conversations. Make the page of this rollout with"), el("pre", {}, `tokcap report ${id} --output ${id}.html`), el("p", { class: "quiet" }, "or follow all of them with tokcap view."));
    return;
  }
  await source.open(id);
}

async function showOverview() {
  list.choose(null);
  show("overview");
  source.leave?.();
  const shown = data.live ? await source.overview() : data.overview;
  if (shown && app.dataset.shows === "overview") overview.show(shown, data.database);
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape" && typing) typing.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = many ? { o: showOverview, "]": () => list.step(1), "[": () => list.step(-1), f: () => list.query.focus() } : {};
  if (event.key in keys) keys[event.key]();
  else if (!(app.dataset.shows === "rollout" && page.key(event))) return;
  event.preventDefault();
});

if (data.rollout) {
  show("rollout");
  page.show(data.rollout);
  page.scroller.focus({ preventScroll: true });
} else {
  list.load();
  const [id, call] = decodeURIComponent(location.hash.slice(1)).split("/");
  if (data.live && id) openRollout(id).then(() => call && page.conversation.goToCall(Number(call)));
  else showOverview();
}
