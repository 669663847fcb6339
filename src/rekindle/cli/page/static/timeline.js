// The timeline of a job: the step at each time, what was saved when, drains, faults and restarts.

import { age, color, h, moment, number } from "./dom.js";

const HEIGHT = 280;
const RANGES = [["all", null], ["last day", 86400], ["last hour", 3600], ["last 5 min", 300]];

export class Timeline {
  constructor(place) {
    this.range = null;
    this.chart = null;
    this.buttons = RANGES.map(([name, span]) => h("button", { "aria-pressed": String(span === null),
      onclick: () => this.choose(span) }, name));
    this.canvas = h("div", { class: "chart", role: "img" });
    this.note = h("p", { class: "note" });
    place.append(h("div", { class: "tools" }, this.buttons, h("span", { class: "right" }, "drag to look closer, double-click for all")),
      this.canvas, this.note);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.remake());
    new ResizeObserver(() => this.chart && this.chart.setSize(this.size())).observe(this.canvas);
  }

  size() { return { width: Math.max(280, this.canvas.clientWidth), height: HEIGHT }; }

  choose(span) {
    this.range = span;
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(RANGES[index][1] === span)));
    this.closer = false;
    this.draw();
  }

  // Takes what was seen lately, and the history, of which either may be missing yet.
  update(now, job, history) {
    const past = history ? history.timeline : { memory: [], storage: [], incidents: [], ends: [] };
    this.now = now;
    this.marks = past.incidents;
    this.drains = job.drains_seen;
    const steps = [...job.steps_seen, ...past.memory];
    for (const one of past.incidents) {
      if (one.step >= 0) steps.push([one.began, one.step]);
      if (one.back !== null && one.restored_step >= 0) steps.push([one.back, one.restored_step + 1]);
    }
    this.data = join([steps.sort((a, b) => a[0] - b[0]), past.storage, past.memory]);
    this.empty = !this.data[0].length;
    this.describe(job, past);
    this.draw();
  }

  describe(job, past) {
    const words = [];
    if (this.empty) words.push("No step is known yet.");
    if (!job.steps_seen.length && past.storage.length) words.push("The job does not train on this node now: the line joins what its files tell.");
    if (past.incidents.length) words.push("Red bands: from a fault to the first new step.");
    if (this.drains.length) words.push("Green bars at the bottom: drains, as seen since this page's server was started.");
    this.note.textContent = words.join(" ");
    const last = past.incidents[past.incidents.length - 1];
    this.canvas.setAttribute("aria-label", `Timeline: step ${number(job.step)} now, ${past.storage.length} points of checkpoints on ` +
      `storage, ${past.incidents.length} faults${last ? `, the last one at step ${last.step}, ${age(this.now, last.began)}` : ""}. ` +
      "The tables below have the same.");
  }

  draw() {
    if (!this.data) return;
    this.canvas.hidden = this.empty;
    if (this.empty) return;
    if (!this.chart) this.make();
    else this.chart.setData(this.data, false);
    if (!this.closer) this.scale();
  }

  // A little room at both ends: points at the edge would be cut.
  scale() {
    const all = this.data[0], last = Math.max(all[all.length - 1], this.range ? this.now : 0);
    const first = this.range ? this.now - this.range : all[0];
    const room = Math.max(1, (last - first) * 0.02);
    this.chart.batch(() => {
      this.chart.setScale("x", { min: first - room, max: last + room });
    });
  }

  remake() {
    if (this.chart) this.chart.destroy();
    this.chart = null;
    this.draw();
  }

  make() {
    const axis = { stroke: color("soft"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") }, font: "12px system-ui, sans-serif" };
    const points = (name, size) => ({ show: true, size, fill: color(name), stroke: color(name) });
    this.chart = new uPlot({
      ...this.size(),
      series: [
        { label: "time", value: (_, at) => moment(at) },
        { label: "step", stroke: color("steps"), width: 1.5, spanGaps: true, points: { show: false }, value: (_, step) => number(step) },
        { label: "on storage", stroke: color("storage"), width: 0, paths: () => null, points: points("storage", 6), value: (_, step) => number(step) },
        { label: "in memory", stroke: color("memory"), width: 0, paths: () => null, points: points("memory", 6), value: (_, step) => number(step) },
      ],
      axes: [{ ...axis, space: 84, values: ticks }, { ...axis, size: 64, values: (_, all) => all.map((step) => (Number.isInteger(step) ? number(step) : "")) }],
      scales: { x: { time: true }, y: { range: (_, low, high) => [Math.max(0, low - 0.05 * (high - low) - 1), high + 0.05 * (high - low) + 1] } },
      cursor: { drag: { x: true, y: false } },
      legend: { live: true },
      hooks: {
        drawClear: [(chart) => this.band(chart)],
        setSelect: [(chart) => { if (chart.select.width > 0) this.closer = true; }],
      },
    }, this.data, this.canvas);
    this.chart.over.addEventListener("dblclick", () => { this.closer = false; this.scale(); });
  }

  band(chart) {
    const { ctx, bbox } = chart;
    const at = (time) => chart.valToPos(time, "x", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const one of this.marks) {
      const from = at(one.began), to = at(one.back === null ? Math.min(this.now, one.began + 1) : one.back);
      ctx.fillStyle = color("band");
      ctx.fillRect(from, bbox.top, Math.max(to - from, 2), bbox.height);
      ctx.fillStyle = color("bad");
      ctx.fillRect(from, bbox.top, 1.5, bbox.height);
    }
    ctx.fillStyle = color("storage");
    for (const [from, to] of this.drains) ctx.fillRect(at(from), bbox.top + bbox.height - 6, Math.max(at(to) - at(from), 2), 5);
    ctx.restore();
  }
}

// Puts several lists of points on one axis of time, as uPlot takes them.
function join(lists) {
  const times = [...new Set(lists.flat().map(([at]) => at))].sort((a, b) => a - b);
  const index = new Map(times.map((at, number) => [at, number]));
  return [times, ...lists.map((points) => {
    const values = new Array(times.length).fill(null);
    for (const [at, step] of points) values[index.get(at)] = step;
    return values;
  })];
}

function ticks(_, times, __, ___, gap) {
  return times.map((at, index) => {
    const words = moment(at);
    const day = index === 0 || moment(times[index - 1]).slice(0, 10) !== words.slice(0, 10);
    if (gap >= 86400) return words.slice(0, 10);
    return `${gap < 60 ? words.slice(11) : words.slice(11, 16)}${day ? `\n${words.slice(0, 10)}` : ""}`;
  });
}
