// Shows the list of jobs or one job, and asks for news once a second while the page is in sight.

import { ask, giveToken, NeedsToken, Refused } from "./api.js";
import { h } from "./dom.js";
import { showList } from "./jobs.js";
import { JobView } from "./job.js";

const main = document.getElementById("main"), live = document.getElementById("live");
const EVERY = 1000;
let view = null, heard = 0, round = 0;

const chosen = () => (/^#job=(.+)$/.exec(location.hash) || [])[1] || null;

async function turn(number) {
  try {
    await look();
    heard = Date.now();
    live.textContent = "live";
    live.className = "";
  } catch (error) {
    if (error instanceof NeedsToken) return askForToken(error.message);
    const silent = heard ? `, for ${Math.round((Date.now() - heard) / 1000)} s` : "";
    live.className = "stale";
    live.textContent = error instanceof Refused ? error.message : `no answer from rekindle ui${silent}`;
    if (!heard) main.replaceChildren(h("p", { class: "wait" }, live.textContent));
  }
  if (number === round) setTimeout(() => next(number), EVERY);
}

function askForToken(why) {
  view = null;
  const field = h("input", { type: "password", autocomplete: "off", required: true, size: 40 });
  const enter = (event) => {
    event.preventDefault();
    giveToken(field.value.trim());
    restart();
  };
  live.textContent = why;
  main.replaceChildren(h("form", { class: "card tools", onsubmit: enter },
    h("label", {}, "Token of the file that rekindle ui was given ", field), h("button", {}, "Show the jobs")));
  field.focus();
}

// A page out of sight waits: then nobody asks, and the server does nothing.
function next(number) {
  if (number !== round) return;
  if (document.hidden) document.addEventListener("visibilitychange", () => next(number), { once: true });
  else turn(number);
}

async function look() {
  const id = chosen();
  if (id !== null) return showJob(id, true);
  const all = await ask("jobs");
  document.getElementById("host").textContent = all.host;
  if (all.jobs === null) throw new Refused(all.error || "the jobs are still being read");
  if (all.jobs.length === 1) return showJob(all.jobs[0].id, false);
  if (!view || view.kind !== "list") view = { kind: "list", place: showList(main) };
  view.place.update(all);
}

async function showJob(id, back) {
  if (!view || view.kind !== "job" || view.id !== id) view = { kind: "job", id, place: new JobView(main, id, back) };
  await view.place.look();
}

function restart() {
  round += 1;
  turn(round);
}

addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  main.focus();
  restart();
});
restart();
