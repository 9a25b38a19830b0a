// A store: size, runs, writers, health, and what gc would free.

import { growth } from "./charts.js";
import { job, view } from "./data.js";
import {
  ago,
  bytes,
  card,
  chips,
  facts,
  h,
  number,
  plural,
  short,
  sparkline,
  stat,
  stepOf,
  table,
  when,
} from "./dom.js";
import { restoreForgotten } from "./changes.js";
import { progressOf } from "./progress.js";

export const title = () => "Store";

export async function render(context) {
  const found = await view(context.store, "store.json", context.signal);
  const to = (id) => `#/${context.store}/commit/${id}`;
  const saved = found.logical_bytes - found.stored_bytes;
  return [
    h(
      "div",
      { class: "title" },
      h("h1", {}, found.name),
      h(
        "span",
        { class: "quiet" },
        `log entry ${number(found.n)}, chunks of ${bytes(found.chunk_bytes)}, ${found.codec}`,
      ),
    ),
    found.older > 0
      ? h("p", { class: "note" }, `${number(found.older)} older commits are counted but not shown.`)
      : null,
    card(
      null,
      h(
        "div",
        { class: "stats" },
        stat(
          "Commits",
          number(found.commits),
          found.forgotten ? `and ${number(found.forgotten)} forgotten` : "",
        ),
        stat("Logical", bytes(found.logical_bytes), "the size of all states"),
        stat("Stored", bytes(found.stored_bytes), plural(found.packs, "pack")),
        stat(
          "Saved by dedup",
          saved > 0 ? bytes(saved) : "–",
          saved > 0.05 * found.logical_bytes
            ? `${(found.logical_bytes / found.stored_bytes).toFixed(1)}× smaller`
            : "nearly all bytes differ",
        ),
        stat("Runs", number(found.runs.length), plural(found.tags.length, "tag")),
      ),
    ),
    found.recent.length
      ? null
      : card("No commits yet", h("p", {}, "The first one appears here when it is made.")),
    h(
      "div",
      { class: "cards" },
      card("Size over time", growth(found.growth).element),
      later(context, "health.json", "Health", health),
    ),
    card("Runs", runs(context, found)),
    h(
      "div",
      { class: "cards" },
      card(
        "Last commits",
        table(
          ["Commit", "Run", "When", "New"],
          found.recent.map((each) => [
            h("a", { href: to(each.id) }, stepOf(each)),
            h("span", {}, each.run, " ", chips(each.tags)),
            h("span", { title: when(each.time) }, ago(each.time)),
            bytes(each.new_bytes),
          ]),
        ),
      ),
      later(context, "space.json", "Space", (space) => spaceOf(context, space), "Look"),
    ),
    found.tags.length
      ? card(
          "Tags",
          h(
            "div",
            { class: "scroll" },
            found.tags.map((tag) =>
              h(
                "a",
                {
                  class: "chip",
                  href: to(tag.id),
                  title: `${tag.run}, ${tag.step === null ? short(tag.id) : `step ${tag.step}`}`,
                },
                tag.name,
              ),
            ),
          ),
        )
      : null,
    restoreForgotten(context, found.forgotten),
  ];
}

function runs(context, found) {
  const most = Math.max(1, ...found.runs.map((run) => run.logical_bytes));
  return table(
    ["Run", "Metric", "", "Commits", "Last step", "When", "Logical, and the share that was new"],
    found.runs.map((run) => [
      h("a", { href: `#/${context.store}/run/${run.key}` }, run.run),
      run.metric || "",
      sparkline(run.spark, `${run.metric || "no metric"} of ${run.run}`),
      number(run.commits),
      number(run.latest.step),
      h("span", { title: when(run.latest.time) }, ago(run.latest.time)),
      h(
        "span",
        { title: `${bytes(run.new_bytes)} new` },
        h("span", {
          class: "bar",
          share: Math.min(1, run.new_bytes / (run.logical_bytes || most)),
        }),
        bytes(run.logical_bytes),
      ),
    ]),
  );
}

const asked = new Set(); // jobs that somebody began, which go on when the store has changed

// A card whose content is a job. With `ask`, it begins when somebody presses the button.
function later(context, address, name, content, ask) {
  const box = h("div", {});
  const start = async () => {
    asked.add(address);
    const shown = progressOf(context.signal);
    box.replaceChildren(shown.element);
    try {
      box.replaceChildren(content(await job(context.store, address, shown.signal, shown.tell)));
    } catch (error) {
      box.replaceChildren(
        h("p", { class: "quiet" }, error.name === "AbortError" ? "Stopped." : error.message),
        h("button", { onclick: start }, "Try again"),
      );
    }
  };
  if (ask && !context.site.static && !(context.fresh && asked.has(address)))
    box.append(
      h("p", { class: "quiet" }, "Reads the metadata of every commit."),
      h("button", { onclick: start }, ask),
    );
  else start();
  return card(name, box);
}

function health(found) {
  const verified = found.packs ? found.verified / found.packs : 0;
  return h(
    "div",
    {},
    found.warning ? h("p", { class: "note" }, found.warning) : null,
    found.damaged_packs.length
      ? h(
          "p",
          { class: "note" },
          `Damage was seen in ${plural(found.damaged_packs.length, "pack")}; ` +
            "run `ckptstore fsck --read-data`.",
        )
      : null,
    facts([
      [
        "Writers",
        found.sessions.length ? plural(found.sessions.length, "session") : "none writes now",
      ],
      [
        "Disk",
        found.free_bytes === null ? "a bucket" : `${bytes(found.free_bytes)} free`,
        found.next_bytes && found.free_bytes
          ? `enough for about ${number(Math.floor(found.free_bytes / found.next_bytes))} more`
          : "",
      ],
      [
        "Verified",
        found.verified
          ? h(
              "span",
              {},
              h("span", { class: "bar", share: verified }),
              `${number(found.verified)} of ${plural(found.packs, "pack")}`,
            )
          : "never on this host",
        found.verified_newest
          ? `last ${ago(found.verified_newest)}`
          : "`ckptstore fsck --read-data`",
      ],
      ["Damage", found.damaged_packs.length ? "seen" : "none seen on this host"],
    ]),
    found.sessions.length
      ? table(
          ["Session", "What", "Host", "Since"],
          found.sessions.map((each) => [
            each.status,
            each.what,
            `${each.host}, ${each.pid}`,
            ago(each.time),
          ]),
        )
      : null,
  );
}

function spaceOf(context, found) {
  return h(
    "div",
    {},
    facts([
      ["Unreferenced", bytes(found.unreferenced_bytes), "stored, but no commit needs it"],
      [
        "gc would free",
        bytes(found.freed_bytes),
        found.later_bytes ? `and ${bytes(found.later_bytes)} once writers have ended` : "",
      ],
      ["Chunks", number(found.chunks)],
    ]),
    h("p", { class: "quiet" }, "Most bytes of their own, freed if this commit alone goes:"),
    table(
      ["Commit", "Run", "Own"],
      found.heaviest.map((each) => [
        h("a", { href: `#/${context.store}/commit/${each.id}` }, stepOf(each)),
        each.run,
        bytes(each.exclusive_bytes),
      ]),
    ),
  );
}
