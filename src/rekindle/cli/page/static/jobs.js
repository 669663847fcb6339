// The list of all jobs: a line for each, those with alarms first.

import { age, bytes, fill, h, number, table } from "./dom.js";

const COLUMNS = ["job", "state", { name: "step", class: "number" }, { name: "steps/s", class: "number" },
  { name: "in memory", class: "number" }, { name: "on storage", class: "number" }, "since",
  { name: "memory", class: "number" }, "alarms"];

export function showList(main) {
  const search = h("input", { type: "search", placeholder: "part of a name", "aria-label": "Show jobs by part of a name" });
  const count = h("span", { class: "right", role: "status" }), place = h("div", { id: "jobs" });
  main.replaceChildren(h("h1", {}, "Jobs of this node"),
    h("section", {}, h("div", { class: "tools" }, h("label", {}, "Find ", search), count), place));
  let last = null;
  const update = (all) => {
    last = all;
    const found = all.jobs.filter((job) => job.root.includes(search.value));
    found.sort((a, b) => Boolean(b.alarms.length) - Boolean(a.alarms.length) || a.root.localeCompare(b.root));
    count.textContent = `${found.length} of ${all.jobs.length} jobs, ${found.filter((job) => job.alarms.length).length} with alarms`;
    // One line at a time: a reader's focus stays on a line while others change.
    if (!place.firstChild) place.append(table("Jobs", COLUMNS, []));
    const body = place.querySelector("tbody");
    const lines = new Map([...body.children].map((line) => [line.dataset.id, line]));
    found.forEach((job, index) => {
      const line = lines.get(job.id) || h("tr", { "data-id": job.id });
      lines.delete(job.id);
      fill(line, [job, age(all.now, job.durable_at)], () => cells(job, all.now));
      if (body.children[index] !== line) body.insertBefore(line, body.children[index] || null);
    });
    lines.forEach((line) => line.remove());
    if (!all.jobs.length) count.textContent = "no jobs have memory on this node; give a ROOT for one that has ended";
  };
  search.addEventListener("input", () => last && update(last));
  return { update };
}

function cells(job, now) {
  const rate = job.steps_per_second === null ? "–" : Number(job.steps_per_second.toPrecision(3)).toString();
  return [
    h("td", { class: "name" }, h("a", { href: `#job=${job.id}` }, job.root)),
    h("td", {}, h("span", { class: `state ${job.state}`, style: { marginLeft: 0 } }, job.state)),
    h("td", { class: "number" }, number(job.step)),
    h("td", { class: "number" }, rate),
    h("td", { class: "number" }, number(job.newest_in_memory)),
    h("td", { class: "number" }, number(job.durable_step)),
    h("td", { class: "none short" }, age(now, job.durable_at)),
    h("td", { class: "number" }, bytes(job.memory_bytes)),
    h("td", { class: job.alarms.length ? "bad long" : "none" }, job.alarms.map((one) => one.what).join("; ") || "none"),
  ];
}
