// Each incident as a bar of the parts of its recovery, and the same as a table.

import { fill, h, moment, number, percent, seconds, table } from "./dom.js";

const PARTS = { noticed: "noticed", secured: "secured", gone: "ended", started: "started", formed: "met",
  restored: "restored", first_step: "first step" };
const FEW = 12;

export class Incidents {
  constructor(place) {
    this.all = false;
    this.place = h("div");
    place.append(this.place);
  }

  update(history) {
    this.history = history;
    fill(this.place, [history.incidents, history.totals, this.all], () => this.show(history));
  }

  show({ incidents, totals }) {
    if (!incidents.length) return h("p", { class: "note" }, "No fault is recorded.");
    const newest = [...incidents].reverse(), shown = this.all ? newest : newest.slice(0, FEW);
    const longest = Math.max(...shown.map((one) => one.outage ?? sum(one)), 0.001);
    const more = newest.length > shown.length &&
      h("button", { onclick: () => { this.all = true; this.update(this.history); } }, `show all ${newest.length}`);
    return [
      h("p", { class: "note" }, words(totals)),
      h("ul", { class: "legend" }, Object.entries(PARTS).map(([name, word]) => h("li", {}, h("i", { class: `p-${name}` }), word))),
      h("div", { id: "bars" }, shown.map((one) => bar(one, longest))),
      more,
      h("details", {}, h("summary", {}, "the same as a table"), rows(shown)),
    ];
  }
}

const sum = (one) => Object.values(one.parts).reduce((total, part) => total + (part || 0), 0);

function words(totals) {
  const found = [`${totals.incidents} ${totals.incidents === 1 ? "fault" : "faults"}`, `${number(totals.lost)} completed steps computed again`];
  if (totals.median_outage !== null) found.push(`from fault to first new step: median ${seconds(totals.median_outage)}, longest ${seconds(totals.longest_outage)}`);
  if (totals.unrecovered) found.push(`without a new step since: ${totals.unrecovered}`);
  if (totals.goodput !== null) found.push(`goodput ${percent(totals.goodput)}`);
  return `${found.join("; ")}.`;
}

// The width of each part is its share of the longest outage, so bars can be compared with each other.
function bar(one, longest) {
  const known = Object.entries(one.parts).filter(([, part]) => part !== null);
  const told = known.map(([name, part]) => `${PARTS[name]} ${seconds(part)}`).join(", ");
  const total = one.outage === null ? "not back" : seconds(one.outage);
  return h("div", { class: "incident", "data-name": `${one.start}-${one.host}`, "data-outage": one.outage },
    h("span", { class: "what", title: one.what }, `${moment(one.at)} ${one.cause}${one.rank >= 0 ? `, rank ${one.rank}` : ""}`),
    h("div", { class: "bar", role: "img", "aria-label": `${one.cause} on ${one.host}: ${told}; in all ${total}` },
      known.map(([name, part]) => h("i", { class: `p-${name}`, title: `${PARTS[name]}: ${seconds(part)}`, "data-part": name,
        "data-seconds": part, style: { width: `${(100 * part) / longest}%` } }))),
    h("span", { class: "total" }, total));
}

function rows(incidents) {
  const columns = ["when", "cause", "rank", "host", "step", "lost", "from", ...Object.values(PARTS), "in all", "what happened"];
  return table("Incidents", columns, incidents.map((one) => h("tr", {},
    h("td", {}, moment(one.at)), h("td", {}, one.cause), h("td", {}, one.rank < 0 ? "–" : one.rank), h("td", {}, one.host),
    h("td", {}, one.step < 0 ? "–" : one.step), h("td", {}, one.lost ?? "–"), h("td", {}, one.place || "–"),
    Object.keys(PARTS).map((name) => h("td", { class: "number" }, part(one.parts[name]))),
    h("td", { class: "number" }, part(one.outage)), h("td", { class: "name" }, one.what))));
}

const part = (value) => (value === null ? "–" : value.toFixed(3));
