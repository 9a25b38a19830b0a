// What the page asks the server for; in a static export the same addresses are files.

const ASK_MS = 300;

export let site = null;

export class Failed extends Error {}

async function json(address, options = {}) {
  let answer;
  try {
    answer = await fetch(address, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failed("The server does not answer. Is `ckptstore ui` still running?");
  }
  const type = answer.headers.get("content-type") || "";
  if (!type.includes("json")) {
    throw new Failed(
      answer.status === 404 && site && site.static
        ? "This is not part of the export. `ckptstore ui` shows it."
        : (await answer.text()).slice(0, 300),
    );
  }
  const value = await answer.json();
  if (value && value.error) throw new Failed(value.error);
  return value;
}

export async function loadSite() {
  site = await json("data/site.json");
  return site;
}

export const view = (store, address, signal) => json(`data/${store}/${address}`, { signal });

// A job's value. It is asked for until it is there; aborting `signal` ends that, and then the job.
export async function job(store, address, signal, tell = () => {}) {
  for (;;) {
    const found = await json(`data/${store}/${address}`, { signal });
    if ("value" in found) return found.value;
    tell(found.progress, found.partial);
    await new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, ASK_MS);
      signal.addEventListener(
        "abort",
        () => {
          clearTimeout(timer);
          reject(new DOMException("stopped", "AbortError"));
        },
        { once: true },
      );
    });
  }
}

export const change = (store, name, body) =>
  json(`change/${store}/${name}`, {
    method: "POST",
    headers: { "content-type": "application/json", "x-ckptstore-token": site.token },
    body: JSON.stringify(body),
  });

const lineages = new Map();

// All commits of a store as columns, as of log entry `n`.
export async function lineage(store, signal) {
  const kept = lineages.get(store);
  const { n } = await view(store, "position.json", signal);
  if (kept && kept.n === n) return kept;
  const found = await view(store, "lineage.json", signal);
  lineages.set(store, found);
  return found;
}

// The ids that a text names: a tag, RUN@STEP, a step, the beginning of an id.
export function resolve(found, text) {
  const wanted = text.trim();
  const [, run, step] = /^(?:(.*)@)?(\d+)$/.exec(wanted) || [];
  const places = [];
  for (let i = found.id.length - 1; i >= 0; i -= 1) {
    if (
      found.tags[i].includes(wanted) ||
      (step !== undefined &&
        found.step[i] === Number(step) &&
        (!run || found.runs[found.run[i]].run === run)) ||
      (/^[0-9a-f]{6,64}$/.test(wanted) && found.id[i].startsWith(wanted))
    )
      places.push(i);
  }
  return places;
}
