// The progress of a job, with a button that stops it.

import { h, number } from "./dom.js";

export function progressOf(outer) {
  const stop = new AbortController();
  outer.addEventListener("abort", () => stop.abort(), { once: true });
  const meter = h("progress", {});
  const words = h("span", { class: "quiet" }, "beginning …");
  return {
    signal: stop.signal,
    element: h(
      "div",
      { class: "actions" },
      meter,
      words,
      h("button", { onclick: () => stop.abort() }, "Stop"),
    ),
    tell([phase, done, total]) {
      if (total) {
        meter.max = total;
        meter.value = done;
      } else meter.removeAttribute("value");
      words.textContent = total > 1 ? `${phase}: ${number(done)} of ${number(total)}` : phase;
    },
  };
}
