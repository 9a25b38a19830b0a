// Elements and texts. Whatever a store says becomes a text node here, never markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "share") element.style.setProperty("--share", `${100 * value}%`);
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, String(value));
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined),
  );
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function sparkline(values, label) {
  const numbers = values.filter((value) => typeof value === "number");
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "spark");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  if (numbers.length > 1) {
    const low = Math.min(...numbers);
    const span = Math.max(...numbers) - low || 1;
    const line = document.createElementNS(SVG, "polyline");
    const step = 100 / (numbers.length - 1);
    line.setAttribute(
      "points",
      numbers
        .map(
          (value, i) => `${(i * step).toFixed(2)},${(22 - (20 * (value - low)) / span).toFixed(2)}`,
        )
        .join(" "),
    );
    svg.append(line);
  }
  return svg;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  let size = value;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit && size < 100 ? size.toFixed(1) : Math.round(size)} ${UNITS[unit]}`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (Number.isSafeInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6)
    ? value.toExponential(3)
    : String(+value.toPrecision(5));
}

export const plural = (count, noun, many = `${noun}s`) =>
  `${number(count)} ${count === 1 ? noun : many}`;

export function when(milliseconds) {
  const date = new Date(milliseconds);
  const two = (part) => String(part).padStart(2, "0");
  return (
    `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}`
  );
}

export function ago(milliseconds) {
  const seconds = Math.max(0, (Date.now() - milliseconds) / 1000);
  for (const [name, length] of [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
  ]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${name} ago`;
  }
  return "just now";
}

export const short = (id) => id.slice(0, 12);
export const stepOf = (commit) =>
  commit.step === null || commit.step === undefined ? short(commit.id) : `step ${commit.step}`;

export const card = (title, ...children) =>
  h("section", { class: "card" }, title && h("h2", {}, title), ...children);
export const chips = (names) => names.map((name) => h("span", { class: "chip" }, name));
export const facts = (pairs) =>
  h(
    "dl",
    { class: "facts" },
    pairs
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value, why]) =>
        h("div", {}, h("dt", {}, name), h("dd", {}, value, why && h("small", {}, why))),
      ),
  );
export const stat = (name, value, why) =>
  h(
    "div",
    { class: "stat" },
    h("span", { class: "quiet" }, name),
    h("strong", {}, value),
    why && h("small", { class: "quiet" }, why),
  );

export function link(text) {
  if (!/^https?:\/\/[^\s]+$/i.test(text)) return text;
  return h("a", { href: text, rel: "noreferrer noopener", target: "_blank" }, text);
}

export function table(columns, rows) {
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((name) => h("th", { scope: "col" }, name)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((cell) => h("td", {}, cell)),
          ),
        ),
      ),
    ),
  );
}

export function say(text) {
  const status = document.getElementById("status");
  status.replaceChildren(text);
  clearTimeout(say.timer);
  say.timer = setTimeout(() => status.replaceChildren(), 6000);
}
