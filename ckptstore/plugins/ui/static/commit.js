// A commit: sizes, metrics, relatives, layout, how to load it, and its leaves.

import { tagForm } from "./changes.js";
import { job, lineage, resolve, view } from "./data.js";
import {
  ago,
  bytes,
  card,
  chips,
  facts,
  h,
  link,
  number,
  plural,
  say,
  short,
  stepOf,
  table,
  when,
} from "./dom.js";
import { progressOf } from "./progress.js";
import { virtualTable } from "./table.js";
import { treemap } from "./treemap.js";

export const title = ({ parts }) => `Commit ${short(parts[0])}`;

export async function render(context) {
  const [id] = context.parts;
  const found = await view(context.store, `commit/${id}.json`, context.signal);
  const to = (each) => `#/${context.store}/commit/${each.id}`;
  const relative = (each) =>
    h(
      "div",
      {},
      each.purged
        ? `${short(each.id)} (purged)`
        : h("a", { href: to(each) }, `${each.run}, ${stepOf(each)}`),
    );
  const parent = found.parents.find((each) => !each.purged);
  return [
    h(
      "div",
      { class: "title" },
      h(
        "div",
        {},
        h("h1", {}, `${found.run}, ${stepOf(found)} `, chips(found.tags)),
        h("span", { class: "mono quiet" }, found.id),
      ),
      h(
        "div",
        { class: "actions" },
        parent &&
          h(
            "a",
            { href: `#/${context.store}/diff/${parent.id}/${found.id}` },
            "What changed since its parent",
          ),
        compareForm(context, found),
      ),
    ),
    found.problems.map((problem) => h("p", { class: "note" }, problem)),
    found.forgotten
      ? h("p", { class: "note" }, "This commit is forgotten: gc deletes it unless it is undeleted.")
      : null,
    tagForm(context, found),
    h(
      "div",
      { class: "cards" },
      card(
        "Commit",
        facts([
          ["Run", h("a", { href: `#/${context.store}/run/${found.run_key}` }, found.run)],
          ["Step", number(found.step)],
          ["Parents", found.parents.length ? found.parents.map(relative) : "none"],
          [
            "Children",
            found.children.length ? found.children.map(relative) : "none",
            found.child_count > found.children.length
              ? `and ${number(found.child_count - found.children.length)} more`
              : "",
          ],
          ["When", `${when(found.time)}, ${ago(found.time)}`],
          ["Message", found.message],
          ["Logical", bytes(found.logical_bytes), "the size of the state"],
          ["New", bytes(found.new_bytes), "what the store grew by"],
          ["Leaves", number(found.leaves), `in ${found.keys.join(", ")}`],
          ["Without", found.thinned.length ? found.thinned.join(", ") : null, "thinned away"],
          [
            "Lossy",
            found.cast.length
              ? found.cast.map(([glob, dtype]) => `${glob} as ${dtype}`).join(", ")
              : null,
          ],
          ["Content", h("span", { class: "mono" }, short(found.content)), "equal for equal states"],
          ["Log entry", number(found.entry), `session ${found.session}`],
          ...found.links.map(([name, text]) => [name, link(text)]),
        ]),
      ),
      found.metrics.length
        ? card(
            "Metrics",
            h(
              "div",
              { class: "scroll list" },
              facts(found.metrics.map(([name, value]) => [name, number(value)])),
            ),
          )
        : null,
      card(
        found.forgotten ? "Bring it back" : "Load it",
        found.lines.map((line) =>
          h(
            "div",
            {},
            h("button", { class: "copy", onclick: () => copy(line.text) }, "Copy"),
            h("span", { class: "quiet" }, line.what),
            h("pre", {}, line.text),
          ),
        ),
        found.incomplete.length
          ? h(
              "p",
              { class: "quiet" },
              `Leaves of ${found.incomplete.join(", ")} were thinned away; other commits have them.`,
            )
          : null,
        found.lines.length || found.incomplete.length
          ? null
          : h("p", { class: "quiet" }, "Nothing of it can be read."),
      ),
      found.world > 1
        ? card(
            `Layout on ${found.world} ranks`,
            table(
              ["Placed as", "Mesh", "Ranks", "Leaves"],
              found.layout.map((row) =>
                row.map((cell) => (typeof cell === "number" ? number(cell) : cell)),
              ),
            ),
          )
        : null,
    ),
    leavesCard(context, found),
  ];
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say("The browser does not let this page copy; mark the lines instead.");
  }
}

function compareForm(context, found) {
  const input = h("input", {
    placeholder: "Compare with tag, run@step, id",
    "aria-label": "Compare with another commit",
  });
  return h(
    "form",
    {
      onsubmit: async (event) => {
        event.preventDefault();
        const all = await lineage(context.store, context.signal);
        const [place] = resolve(all, input.value);
        if (place === undefined) say("No commit is called that.");
        else location.hash = `#/${context.store}/diff/${all.id[place]}/${found.id}`;
      },
    },
    input,
  );
}

// Add the other parts of the leaves to the columns of the first.
async function addParts(context, id, leaves) {
  for (let part = 1; part * leaves.part < leaves.total; part += 1) {
    const more = await view(context.store, `leaves/${id}/${part}.json`, context.signal);
    for (const name of ["path", "type", "shape", "bytes", "value", "alias", "gone"])
      leaves[name] = leaves[name].concat(more[name]);
  }
}

function leavesCard(context, found) {
  const box = h("div", {}, h("p", { class: "quiet" }, "Reading the leaves …"));
  const fill = async () => {
    const leaves = await view(context.store, `leaves/${found.id}/0.json`, context.signal);
    const shared = { value: null };
    const listed = leafTable(context, found, leaves, shared);
    const filter = h("input", {
      type: "search",
      placeholder: "Part of a path, or a glob: layers.*.weight",
      "aria-label": "Filter leaves",
    });
    const count = h("span", { class: "quiet" }, "");
    const save = h("a", {}, "Download as safetensors");
    const refilter = () => {
      const accepts = matcher(filter.value.trim());
      count.textContent = plural(
        listed.filter(accepts && ((i) => accepts(leaves.path[i]))),
        "leaf",
        "leaves",
      );
      save.hidden = leaves.gone.some((gone, i) => gone && (!accepts || accepts(leaves.path[i])));
      const glob = filter.value.trim();
      const plain = glob.replaceAll("[", "[[]");
      const select = /[*?]/.test(glob) ? plain : `*${plain}*`;
      const asked = new URLSearchParams({ select });
      save.href = `download/${context.store}/${found.id}.safetensors?${asked}`;
    };
    filter.addEventListener("input", refilter);
    refilter();
    const map = h("div", {});
    const share = sharing(context, found, shared, listed);
    box.replaceChildren(
      map,
      h("div", { class: "controls" }, filter, count, context.site.static ? "" : save, share),
      listed.element,
    );
    await addParts(context, found.id, leaves);
    listed.grow(leaves.total);
    refilter();
    map.replaceChildren(
      treemap(leaves, (prefix) => {
        filter.value = prefix ? `${prefix}*` : "";
        refilter();
      }),
    );
  };
  fill().catch((error) => {
    if (error.name !== "AbortError") box.replaceChildren(h("p", { class: "error" }, error.message));
  });
  return card("Leaves", box);
}

function matcher(text) {
  if (!text) return null;
  if (!/[*?]/.test(text)) return (path) => path.includes(text);
  const pattern = text
    .replace(/[.+^${}()|[\]\\]/g, "\\$&")
    .replace(/\*/g, ".*")
    .replace(/\?/g, ".");
  const glob = new RegExp(`^(?:[^/]*/)?${pattern}$`);
  return (path) => glob.test(path);
}

function leafTable(context, found, leaves, shared) {
  const to = (i) => `#/${context.store}/tensor/${found.id}/${i}`;
  const most = leaves.bytes.reduce((a, b) => Math.max(a, b), 1);
  const shape = (i) =>
    leaves.shape[i]
      ? leaves.shape[i].length
        ? leaves.shape[i].join(" × ")
        : "scalar"
      : (leaves.value[i] ?? "");
  const stored = (i) => shared.value?.stored[i];
  const since = (i) => shared.value && shared.value.since[shared.value.place[i]];
  return virtualTable(
    [
      {
        name: "Leaf",
        wide: true,
        cell: (i) => h("a", { href: to(i), title: leaves.path[i] }, leaves.path[i]),
        sort: (i) => leaves.path[i],
      },
      { name: "Type", cell: (i) => leaves.type[i], sort: (i) => leaves.type[i] },
      { name: "Shape or value", cell: shape, width: "minmax(7rem, 1.2fr)" },
      {
        name: "Bytes",
        right: true,
        cell: (i) =>
          leaves.alias[i]
            ? h("span", { class: "quiet", title: `shares memory with ${leaves.alias[i]}` }, "alias")
            : bytes(leaves.bytes[i]),
        sort: (i) => leaves.bytes[i],
      },
      {
        name: "",
        cell: (i) => h("span", { class: "bar", share: leaves.bytes[i] / most }),
        width: "90px",
      },
      {
        name: "Stored",
        right: true,
        cell: (i) =>
          shared.value
            ? stored(i) === 0
              ? "in a page"
              : bytes(stored(i))
            : h("span", { class: "quiet" }, "–"),
        sort: (i) => stored(i),
      },
      {
        name: "Same in",
        right: true,
        cell: (i) =>
          shared.value
            ? `${number(shared.value.commits[i])} of ${number(shared.value.compared)}`
            : h("span", { class: "quiet" }, "–"),
        sort: (i) => shared.value?.commits[i],
      },
      {
        name: "Unchanged since",
        width: "8rem",
        cell: (i) =>
          shared.value && shared.value.place[i]
            ? h(
                "a",
                { href: `#/${context.store}/commit/${since(i)[0]}` },
                since(i)[1] === null ? short(since(i)[0]) : `step ${number(since(i)[1])}`,
              )
            : "",
      },
    ],
    leaves.path.length,
    {
      label: "Leaves",
      open: (i) => {
        location.hash = to(i);
      },
      height: 460,
    },
  );
}

function sharing(context, found, shared, listed) {
  const box = h("span", {});
  const start = async () => {
    const shown = progressOf(context.signal);
    box.replaceChildren(shown.element);
    try {
      shared.value = await job(context.store, `sharing/${found.id}.json`, shown.signal, shown.tell);
      listed.redraw();
      box.replaceChildren(
        h("span", { class: "quiet" }, `compared with ${plural(shared.value.compared, "commit")}`),
      );
    } catch (error) {
      box.replaceChildren(
        error.name === "AbortError"
          ? h("button", { onclick: start }, "Find shared leaves")
          : h("span", { class: "error" }, error.message),
      );
    }
  };
  box.append(
    h(
      "button",
      { onclick: start, title: "Stored bytes, and the commits with the same content" },
      "Find shared leaves",
    ),
  );
  return box;
}
