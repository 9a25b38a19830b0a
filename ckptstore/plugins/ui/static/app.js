// The frame of the page: which view is shown, the bar above it, and what is new in the store.

import { disposeGone } from "./charts.js";
import { Failed, lineage, loadSite, resolve, site, view } from "./data.js";
import { h, say } from "./dom.js";

const VIEWS = {
  store: () => import("./store.js"),
  run: () => import("./run.js"),
  lineage: () => import("./lineage.js"),
  commit: () => import("./commit.js"),
  tensor: () => import("./tensor.js"),
  diff: () => import("./diff.js"),
};

// Views that change with the store. Others would lose what was measured in them.
const FOLLOWING = ["store", "run", "lineage"];

const main = document.getElementById("main");
let shown = null;
let begun = null; // the view that is not there yet
let position = null; // of the log, from before the view was asked for: it may show more

function route() {
  const [store = "0", name = "store", ...parts] = location.hash
    .replace(/^#\/?/, "")
    .split("/")
    .filter(Boolean);
  return { store: Number(store), name, parts };
}

// Show what the address says. What was shown stays until the new view is there. With `fresh`, the
// same view is drawn again because the store has changed.
async function show({ fresh = false } = {}) {
  const at = route();
  if (!fresh) shown?.stop.abort();
  begun?.abort();
  const stop = (begun = new AbortController());
  const context = { ...at, signal: stop.signal, site, fresh, refresh: () => show({ fresh: true }) };
  bar(at);
  try {
    if (!(at.name in VIEWS) || !site.stores[at.store]) throw new Failed("There is no such page.");
    if (FOLLOWING.includes(at.name) && !site.static) position = await positionOf(at.store);
    const { render, title } = await VIEWS[at.name]();
    const content = await render(context);
    if (stop.signal.aborted) return;
    shown?.stop.abort();
    const top = window.scrollY;
    main.replaceChildren(...[content].flat(Infinity).filter(Boolean));
    main.dataset.view = location.hash;
    document.title = `${title(at)} · ckptstore`;
    if (fresh) window.scrollTo(0, top);
    else {
      window.scrollTo(0, 0);
      main.focus({ preventScroll: true });
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Failed)) console.error(error);
    main.replaceChildren(
      h("h1", {}, "This cannot be shown"),
      h("p", { class: "error" }, error.message),
    );
  }
  shown = { stop, at };
  disposeGone();
}

function bar(at) {
  const tab = (name, text) =>
    h(
      "a",
      { href: `#/${at.store}/${name}`, "aria-current": at.name === name ? "page" : null },
      text,
    );
  const stores =
    site.stores.length > 1 &&
    h(
      "select",
      {
        "aria-label": "Store",
        onchange: (event) => {
          location.hash = `#/${event.target.value}/store`;
        },
      },
      site.stores.map((store) =>
        h("option", { value: store.number, selected: store.number === at.store }, store.name),
      ),
    );
  const input = h("input", {
    type: "search",
    placeholder: "Tag, run@step or id   ( / )",
    "aria-label": "Go to a commit",
    autocomplete: "off",
  });
  const form = h(
    "form",
    {
      role: "search",
      onsubmit: (event) => {
        event.preventDefault();
        goTo(at.store, input.value);
      },
    },
    input,
  );
  document
    .getElementById("bar")
    .replaceChildren(
      h(
        "div",
        {},
        h("a", { class: "brand", href: `#/${at.store}/store` }, "ckptstore"),
        stores || h("span", { class: "quiet" }),
        h("nav", { "aria-label": "Pages" }, tab("store", "Store"), tab("lineage", "Lineage")),
        h(
          "span",
          { class: site.static ? "live static" : "live", id: "live" },
          site.static ? "export" : "live",
        ),
        form,
      ),
    );
}

async function goTo(store, text) {
  try {
    const found = await lineage(store);
    const places = resolve(found, text);
    if (!places.length) say(`No commit is called ${text.slice(0, 80)}.`);
    else {
      if (places.length > 1) say(`${places.length} commits match; this is the newest.`);
      location.hash = `#/${store}/commit/${found.id[places[0]]}`;
    }
  } catch (error) {
    say(error.message);
  }
}

async function positionOf(store) {
  const { n } = await view(store, "position.json");
  return `${store}:${n}`;
}

// Ask for the log's position now and then; if it has moved, draw the view again.
async function follow() {
  const at = route();
  const store = site.stores[at.store] || site.stores[0];
  if (!document.hidden) {
    const live = document.getElementById("live");
    try {
      const moved = (await positionOf(store.number)) !== position;
      live?.classList.remove("off");
      if (moved && !busy() && FOLLOWING.includes(at.name)) await show({ fresh: true });
    } catch (error) {
      live?.classList.add("off");
    }
  }
  setTimeout(follow, 1000 * store.poll_s);
}

// Somebody types, or reads a dialog: the view must not change under their hands.
const busy = () =>
  document.querySelector(
    "dialog[open], input:focus:not([type=checkbox]), textarea:focus, select:focus",
  );

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    document.querySelector("#bar input")?.focus();
  } else if (event.key === "s") location.hash = `#/${route().store}/store`;
  else if (event.key === "l") location.hash = `#/${route().store}/lineage`;
});

window.addEventListener("hashchange", () => show());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show({ fresh: true }));
if (location.search) history.replaceState(null, "", location.pathname + location.hash);

try {
  await loadSite();
  await show();
  if (!site.static) follow();
} catch (error) {
  main.replaceChildren(
    h("h1", {}, "This cannot be shown"),
    h("p", { class: "error" }, error.message),
  );
}
