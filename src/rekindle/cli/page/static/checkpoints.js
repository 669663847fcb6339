// Where each checkpoint is, newest first. The server gives a page of the list at a time.

import { ask } from "./api.js";
import { bytes, clock, fill, h, moment, number, table } from "./dom.js";

const AT_ONCE = 20;
const FILTERS = { "": "all", memory: "in memory", peer: "on other nodes", storage: "on storage", pinned: "pinned or best", damaged: "damaged" };
const COLUMNS = [{ name: "step", class: "number" }, "in memory", "on other nodes", "on storage", "verified",
  { name: "size", class: "number" }, "start"];

export class Checkpoints {
  constructor(place, id) {
    this.id = id;
    this.skip = 0;
    this.only = h("select", { "aria-label": "Show checkpoints", onchange: () => this.go(0) },
      Object.entries(FILTERS).map(([value, name]) => h("option", { value }, name)));
    this.step = h("input", { type: "search", size: 10, inputmode: "numeric", placeholder: "step", "aria-label": "Show steps that begin with", oninput: () => this.go(0) });
    this.count = h("span", { class: "right", role: "status" });
    this.newer = h("button", { onclick: () => this.go(this.skip - AT_ONCE) }, "newer");
    this.older = h("button", { onclick: () => this.go(this.skip + AT_ONCE) }, "older");
    this.place = h("div", { id: "checkpoints" });
    place.append(h("div", { class: "tools" }, this.only, this.step, this.newer, this.older, this.count), this.place);
  }

  async go(skip) {
    this.skip = Math.max(0, skip);
    await this.look();
  }

  async look() {
    const query = new URLSearchParams({ skip: this.skip, count: AT_ONCE, only: this.only.value, step: this.step.value.trim() });
    const asked = query.toString();
    this.asked = asked;
    const found = await ask(`jobs/${this.id}/checkpoints?${asked}`);
    if (this.asked !== asked) return; // another choice was made meanwhile
    const to = Math.min(found.total, this.skip + AT_ONCE);
    const shown = found.total ? `${number(this.skip + 1)} to ${number(to)} of ${number(found.total)}` : "none";
    this.count.textContent = found.at === null ? "storage is being read …" : `${shown}, as of ${clock(found.at)}`;
    this.newer.disabled = this.skip === 0;
    this.older.disabled = to >= found.total;
    fill(this.place, found.lines, () => table("Checkpoints", COLUMNS, found.lines.map(line)));
  }
}

function line(one) {
  const marks = [["node-safe", one.node_safe], ["pinned", one.pinned], ["best", one.best]].filter(([, holds]) => holds);
  const size = one.storage?.bytes ?? one.memory?.bytes ?? null;
  const start = one.generation === 0 ? "–" : `${one.generation}, from ${one.continued_from === null ? "scratch" : `step ${one.continued_from}`}`;
  return h("tr", { "data-step": one.step },
    h("td", { class: "number" }, h("b", {}, number(one.step))),
    place(one.memory), place(one.peer), place(one.storage, marks),
    verified(one.storage), h("td", { class: "number" }, size ? bytes(size) : "–"), h("td", { class: "none" }, start));
}

function place(one, marks = []) {
  const told = marks.map(([word]) => h("span", { class: "mark" }, word));
  if (!one) return h("td", { class: "none" }, "–", told);
  const words = [];
  if (one.saved_at !== null) words.push(moment(one.saved_at));
  if (one.nodes.length) words.push(one.nodes.join(", "));
  if (one.ranks !== one.world && one.world) words.push(`${one.ranks} of ${one.world} ranks`);
  const bad = !["complete", "abandoned"].includes(one.condition);
  if (one.condition !== "complete") words.push(one.condition);
  if (one.missing.length) words.push(`not on ${one.missing.join(", ")}`);
  return h("td", { class: bad ? "bad" : null }, words.join(", ") || "yes", told);
}

// Every byte is compared with its checksum while it is written to storage. Later only a reading can tell.
function verified(storage) {
  if (!storage) return h("td", { class: "none" }, "–");
  if (storage.condition === "damaged") return h("td", { class: "bad" }, "damaged");
  if (storage.read_at === null) return h("td", { class: "none" }, "when written");
  return h("td", { class: storage.sound ? null : "bad" }, `${storage.sound ? "read back sound" : "damaged"}, ${moment(storage.read_at)}`);
}
