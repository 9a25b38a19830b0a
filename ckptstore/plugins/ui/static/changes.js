// What the page changes, where the server allows it: tags, forget, undelete. Each asks first.

import { change, view } from "./data.js";
import { card, h, number, say, short, stepOf } from "./dom.js";

export function ask(question, list, verb) {
  return new Promise((resolve) => {
    const answer = (value) => {
      dialog.close();
      dialog.remove();
      resolve(value);
    };
    const dialog = h(
      "dialog",
      { "aria-label": question, oncancel: () => answer(false) },
      h("h2", {}, question),
      h(
        "div",
        { class: "list mono" },
        list.map((line) => h("div", {}, line)),
      ),
      h(
        "p",
        { class: "actions" },
        h("button", { class: "main", onclick: () => answer(true) }, verb),
        h("button", { onclick: () => answer(false) }, "Cancel"),
      ),
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}

async function carryOut(context, name, body) {
  try {
    say((await change(context.store, name, body)).done);
    await context.refresh();
  } catch (error) {
    say(error.message);
  }
}

export function tagForm(context, commit) {
  if (!context.site.changes) return null;
  const input = h("input", { placeholder: "new tag", "aria-label": "New tag", maxlength: 200 });
  return h(
    "form",
    {
      class: "actions",
      onsubmit: (event) => {
        event.preventDefault();
        input.blur();
        carryOut(context, "tag", { name: input.value, commit: commit.id });
      },
    },
    input,
    h("button", {}, "Tag"),
    commit.tags.map((tag) =>
      h(
        "button",
        {
          type: "button",
          onclick: async () => {
            if (await ask(`Remove the tag ${tag}?`, [], "Remove it"))
              carryOut(context, "untag", { name: tag });
          },
        },
        `Untag ${tag}`,
      ),
    ),
    commit.forgotten
      ? h(
          "button",
          {
            type: "button",
            onclick: () => carryOut(context, "undelete", { commits: [commit.id] }),
          },
          "Undelete",
        )
      : h(
          "button",
          { type: "button", class: "danger", onclick: () => forget(context, [commit]) },
          "Forget …",
        ),
  );
}

// `commits` are those of a preview: exactly these are forgotten.
export async function forget(context, commits) {
  const body = { commits: commits.map((each) => each.id) };
  const lines = commits.map((each) => `${short(each.id)}  ${stepOf(each)}`);
  try {
    const { question } = await change(context.store, "forget", { ...body, dry_run: true });
    const asked = `${question[0].toUpperCase()}${question.slice(1)}`;
    if (!(await ask(`${asked} Until a gc, undelete brings them back.`, lines, "Forget them")))
      return;
  } catch (error) {
    say(error.message);
    return;
  }
  await carryOut(context, "forget", body);
}

export function restoreForgotten(context, count) {
  if (!count || context.site.static) return null;
  const box = h("div", {});
  const look = async () => {
    const found = await view(context.store, "forgotten.json", context.signal);
    box.replaceChildren(
      ...found.commits.map((each) =>
        h(
          "div",
          { class: "actions" },
          h("a", { href: `#/${context.store}/commit/${each.id}` }, `${each.run}, ${stepOf(each)}`),
          context.site.changes
            ? h(
                "button",
                { onclick: () => carryOut(context, "undelete", { commits: [each.id] }) },
                "Undelete",
              )
            : null,
        ),
      ),
    );
  };
  box.append(h("button", { onclick: look }, `Show ${number(count)}`));
  return card("Forgotten, until a gc", box);
}
