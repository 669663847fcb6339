// One job: alarms, numbers, timeline, incidents, distributions, checkpoints, ranks and nodes.

import { ask, Refused } from "./api.js";
import { Checkpoints } from "./checkpoints.js";
import { age, bytes, fill, h, number, percent, seconds, table } from "./dom.js";
import { Incidents } from "./incidents.js";
import { Timeline } from "./timeline.js";

const HISTORY_EVERY = 3000, MOST_PROBLEMS = 20;

export class JobView {
  constructor(main, id, back) {
    this.id = id;
    this.history = null;
    this.historyAt = -Infinity;
    const part = (title, name) => {
      const place = h("section", { id: name, "aria-label": title }, h("h2", {}, title));
      return place;
    };
    this.head = h("div");
    this.alarms = h("div", { role: "alert" });
    this.tiles = h("div");
    this.drain = h("div");
    const timeline = part("Timeline", "timeline"), incidents = part("Recoveries", "incidents");
    const spread = part("Time of steps and stalls", "spread"), checkpoints = part("Checkpoints", "checkpoints-part");
    const members = part("Ranks and nodes", "members");
    this.problems = h("div");
    this.spread = h("div");
    spread.append(this.spread);
    this.members = h("div");
    members.append(this.members);
    main.replaceChildren(back ? h("a", { href: "#" }, "all jobs") : "", this.head, this.alarms, this.tiles, this.drain,
      timeline, incidents, spread, checkpoints, members, this.problems);
    this.timeline = new Timeline(timeline);
    this.incidents = new Incidents(incidents);
    this.checkpoints = new Checkpoints(checkpoints, id);
  }

  // The past is asked for beside the present: storage that is slow holds nothing up.
  async look() {
    if (!this.asking && performance.now() - this.historyAt >= HISTORY_EVERY) {
      this.trouble = null;
      this.asking = this.lookBack().catch((error) => { this.trouble = error; }).finally(() => { this.asking = null; });
    }
    const answer = await ask(`jobs/${this.id}`);
    if (answer.job === null) throw new Refused(answer.error || "the job is still being read");
    this.present = answer;
    this.show(answer.now, answer.job);
    if (answer.error) throw new Refused(answer.error);
    if (this.trouble) throw this.trouble;
  }

  async lookBack() {
    const [answer] = await Promise.all([ask(`jobs/${this.id}/history`), this.checkpoints.look()]);
    if (answer.history === null) return;
    this.history = answer.history;
    this.historyAt = performance.now();
    this.incidents.update(answer.history);
    if (this.present) this.show(this.present.now, this.present.job);
    if (answer.error) throw new Refused(answer.error);
  }

  show(now, job) {
    document.title = `${job.root.split("/").pop()} – Rekindle`;
    fill(this.head, [job.root, job.state], () => h("h1", {}, job.root, h("span", { class: `state ${job.state}` }, job.state)));
    const alarms = [...job.alarms, ...(this.history ? this.history.alarms : [])];
    fill(this.alarms, alarms, () => alarms.length && showAlarms(alarms));
    fill(this.tiles, [job, this.history && [this.history.used, this.history.totals, this.history.newest_stored], Math.floor(now)], () => showTiles(now, job, this.history));
    fill(this.drain, job.status.drain, () => showDrain(job.status.drain));
    this.timeline.update(now, job, this.history);
    fill(this.spread, job.distributions, () => showSpread(job.distributions));
    fill(this.members, [job.status.ranks, job.status.nodes], () => showMembers(job.status));
    const problems = this.history ? this.history.problems : [];
    fill(this.problems, problems, () => problems.length && showProblems(problems));
  }
}

function showAlarms(alarms) {
  return h("section", { class: "alarms" }, h("h2", {}, alarms.length === 1 ? "1 alarm" : `${alarms.length} alarms`),
    h("ul", {}, alarms.map((one) => h("li", { "data-kind": one.kind }, h("b", {}, one.what), h("br"), h("span", { class: "do" }, one.do)))));
}

function showProblems(problems) {
  return h("section", { id: "problems" }, h("h2", {}, "Left out, as it can't be read"),
    h("ul", {}, problems.slice(0, MOST_PROBLEMS).map((one) => h("li", {}, one))),
    problems.length > MOST_PROBLEMS && h("p", { class: "note" }, `and ${problems.length - MOST_PROBLEMS} more`));
}

function showTiles(now, job, history) {
  const lag = (step) => (step === null || step === undefined || job.step === null ? "" : behind(job.step - step));
  const rate = job.steps_per_second === null ? "" : job.steps_per_second >= 1 ? `${job.steps_per_second.toFixed(2)} steps/s` : job.steps_per_second ? `${seconds(1 / job.steps_per_second)} a step` : "no new step lately";
  const fault = job.status.fault, several = job.status.nodes && job.status.nodes.length;
  const totals = history && history.totals, used = history && history.used;
  const stored = history && history.newest_stored, noted = job.durable_step ?? -1;
  const durable = stored && stored.step > noted ? stored : { step: job.durable_step, at: job.durable_at };
  const tile = (name, big, small, more) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", { class: "big" }, big), h("dd", { class: "small" }, small || ""), more);
  const room = job.room, held = job.status.memory_bytes;
  const meter = room && held ? h("div", { class: "meter", "aria-hidden": "true" }, h("i", { style: { width: `${Math.min(100, (100 * held) / room.total)}%` } })) : null;
  return h("dl", { class: "tiles" },
    tile("step", number(job.step), job.step === null ? "no rank trains here" : rate),
    tile("in memory", number(job.newest_in_memory), lag(job.newest_in_memory)),
    several ? tile("safe from the loss of a node", number(job.node_safe_step), lag(job.node_safe_step)) : null,
    tile("on storage", number(durable.step), [lag(durable.step), age(now, durable.at)].filter(Boolean).join(", ")),
    tile("goodput", totals ? percent(totals.goodput) : "…", totals && totals.goodput !== null ? `${seconds(totals.productive)} of ${seconds(totals.wall)}` : "known once a fault is recorded"),
    tile("faults", totals ? number(totals.incidents) : "…", fault ? `last ${age(now, fault.at)}` : ""),
    tile("memory used", bytes(held ?? 0), room ? `of ${bytes(room.total)}` : "", meter),
    tile("storage used", used ? bytes(used.storage.bytes) : "…", used ? `${number(used.storage.checkpoints)} checkpoints` : ""));
}

const behind = (steps) => (steps <= 0 ? "the newest step" : `${number(steps)} ${steps === 1 ? "step" : "steps"} behind`);

function showDrain(drain) {
  if (!drain || drain.step === null || drain.step === undefined) return null;
  const share = Math.floor((100 * drain.done) / Math.max(drain.total, 1));
  return h("p", { class: "drain" }, `Step ${number(drain.step)} is on its way to storage: ${bytes(drain.done)} of ${bytes(drain.total)} `,
    h("progress", { max: 100, value: share, "aria-label": "Drain" }));
}

function showSpread(found) {
  if (!found || !found.step_seconds.count) return h("p", { class: "note" }, "Not recorded: no rank trains on this node, or it has not made two steps yet.");
  return [h("div", { class: "two" },
    histogram("From one step to the next", found.bounds, found.step_seconds),
    histogram("Stall: training held up by a save", found.bounds, found.stalls)),
  h("p", { class: "note" }, `Of the newest start, ${found.ranks} ${found.ranks === 1 ? "rank" : "ranks"} of this node. Each bar ends at three times the time of the one before.`)];
}

function histogram(title, bounds, { counts, count, mean }) {
  const first = counts.findIndex(Boolean), last = counts.length - 1 - [...counts].reverse().findIndex(Boolean);
  const [from, to] = [Math.max(0, first - 1), Math.min(counts.length - 1, last + 1)];
  const most = Math.max(...counts, 1), shown = counts.slice(from, to + 1);
  const name = (index) => (index < bounds.length ? `≤ ${short(bounds[index])}` : "more");
  const told = shown.map((n, index) => n && `${name(from + index)}: ${n}`).filter(Boolean).join(", ");
  return h("div", {}, h("h3", { class: "note" }, `${title}: ${number(count)}, mean ${seconds(mean)}`),
    h("div", { class: "histogram", role: "img", "aria-label": `${title}: ${told}` },
      shown.map((n, index) => h("div", { title: `${name(from + index)}: ${n}`, style: { height: `${(100 * n) / most}%` } }))),
    h("div", { class: "scale", "aria-hidden": "true" }, shown.map((_, index) => h("span", {}, name(from + index)))));
}

const short = (value) => (value < 1 ? `${+(value * 1000).toFixed(1)} ms` : `${value} s`);

function showMembers({ ranks, nodes, trainers, agent }) {
  if (!trainers) return h("p", { class: "note" }, "The job has nothing in this node's memory: what is shown above is from its files.");
  const some = (step) => (step === null || step === undefined || step < 0 ? "–" : number(step));
  const found = [h("p", { class: "note" }, `Processes on this node: ${Object.entries(trainers).map(([rank, pid]) => `rank ${rank} is ${pid}`).join(", ") || "no rank"}; agent ${agent ?? "none"}.`)];
  if (nodes && nodes.length) found.push(table("Nodes", ["node", "ranks", "is", "in memory", "on storage", "last heard"], nodes.map((node) => h("tr", {},
    h("td", {}, node.name), h("td", {}, node.ranks.join(" ")), h("td", { class: ["silent", "lost", "agent gone"].includes(node.state) ? "bad" : null }, node.state),
    h("td", {}, some(node.newest)), h("td", {}, some(node.durable)), h("td", {}, node.seconds === null ? "–" : `${seconds(node.seconds)} ago`)))));
  const pages = Object.entries(ranks || {});
  if (pages.length) found.push(h("details", { open: pages.length <= 16 }, h("summary", {}, `${pages.length} ranks`), table("Ranks", ["rank", "node", "does", "step", "in memory", "for", "longest step"], pages.map(([rank, page]) => h("tr", {},
    h("td", {}, rank), h("td", {}, page.node || "this one"), h("td", {}, page.note ? `${page.does}: ${page.note}` : page.does), h("td", {}, some(page.step)),
    h("td", {}, some(page.in_memory)), h("td", {}, seconds(page.age)), h("td", {}, page.longest_step ? seconds(page.longest_step) : "–"))))));
  return found;
}
