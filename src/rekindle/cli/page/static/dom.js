// Makes elements, and words for numbers. Text is only ever set as text: names of jobs can't become markup.

export function h(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Fills a place again only if what is shown there has changed: a reader's focus and selection stay.
const shown = new WeakMap();
export function fill(place, facts, make) {
  const key = JSON.stringify(facts);
  if (shown.get(place) === key) return;
  shown.set(place, key);
  const before = [...place.querySelectorAll("details")];
  const focused = before.findIndex((one) => one.firstChild === document.activeElement);
  place.replaceChildren(...[make()].flat().filter(Boolean));
  [...place.querySelectorAll("details")].forEach((one, index) => {
    if (before[index]) one.open = before[index].open;
    if (index === focused) one.firstChild.focus();
  });
}

export function table(caption, columns, rows) {
  const head = columns.map((column) => h("th", { scope: "col", class: column.class }, column.name ?? column));
  return h("div", { class: "scroll" },
    h("table", { "aria-label": caption }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
}

export const number = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US"));

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toPrecision(2)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  if (value < 129600) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} d`;
}

export function age(now, at) {
  if (at === null || at === undefined) return "";
  const since = Math.max(0, now - at);
  return since < 99.5 ? `${Math.round(since)} s ago` : `${seconds(since)} ago`;
}

export function moment(at) {
  if (at === null || at === undefined) return "–";
  const date = new Date(at * 1000), two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export const clock = (at) => moment(at).slice(11);
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
