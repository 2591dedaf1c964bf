// What a live page asks its server for, and what it is told without asking.

class Live {
  constructor() {
    this.events = null;
    this.changed = new Set();
  }

  async get(path, parameters = {}) {
    const url = new URL(path, location.href.split("#")[0]);
    for (const [name, value] of Object.entries(parameters)) if (value !== null) url.searchParams.set(name, value);
    const response = await fetch(url);
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    return answer;
  }

  async more(wanted, before) {
    if (!this.events) this.listen();
    const { lines, more } = await this.get("api/rollouts", { ...wanted, before });
    lines.more = more;
    return lines;
  }

  async overview() {
    const found = await this.get("api/overview");
    // It may be one that was made before the last change.
    if (found.made_at !== this.overviewMadeAt) this.overviewOld = false;
    this.overviewMadeAt = found.made_at;
    if (this.overviewOld) this.overviewLater();
    return found;
  }

  leave() {
    this.id = null;
  }

  async open(id) {
    this.id = id;
    await this.load(id, false);
  }

  async load(id, keep) {
    const begun = performance.now();
    this.loading = true;
    try {
      const rollout = await this.get(`api/rollouts/${encodeURIComponent(id)}`);
      if (this.id !== id) return;
      show("rollout");
      page.show(rollout, keep);
      if (!keep) {
        history.replaceState(null, "", `#${id}`);
        page.scroller.focus({ preventScroll: true });
      }
    } catch (error) {
      if (this.id === id && !keep) {
        show("overview");
        overviewRoot.replaceChildren(el("h1", {}, id), el("p", { class: "bad" }, error.message));
      }
    } finally {
      this.loading = false;
      // A long rollout is not asked for more often than a tenth of the time.
      this.rest = Math.max(700, 10 * (performance.now() - begun));
      this.restSince = performance.now();
    }
    this.refresh();
  }

  /** Ask again for the rollout that is shown once it has changed, but not too soon. */
  refresh() {
    if (!this.id || this.loading || !this.changed.has(this.id)) return;
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => {
      if (!this.id || this.loading) return;
      this.changed.delete(this.id);
      this.load(this.id, true);
    }, Math.max(0, this.rest - (performance.now() - this.restSince)));
  }

  listen() {
    this.events = new EventSource("api/events");
    const status = (text, name) => {
      list.status.className = `live ${name}`;
      list.status.textContent = text;
    };
    status("connecting", "");
    this.events.onopen = () => {
      // What changed before the first event is in this list.
      list.load();
      status("live", "on");
    };
    this.events.onerror = () => {
      status("not connected", "off");
    };
    this.events.addEventListener("rollouts", (event) => {
      const lines = JSON.parse(event.data);
      list.update(lines);
      for (const line of lines) this.changed.add(line.id);
      this.refresh();
      this.overviewLater();
    });
    this.events.addEventListener("trouble", (event) => status(JSON.parse(event.data), "off"));
  }

  overviewLater() {
    this.overviewOld = true;
    if (app.dataset.shows !== "overview" || this.overviewWaiting || this.id) return;
    this.overviewWaiting = setTimeout(() => {
      this.overviewWaiting = null;
      if (app.dataset.shows === "overview" && !this.id) showOverview();
    }, 5000);
  }
}
