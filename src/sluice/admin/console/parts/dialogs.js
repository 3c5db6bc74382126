// Dialogs, notices, and their errors. Built on <dialog>: the browser keeps the focus inside, closes
// on Esc and makes the rest inert. The focus is returned here, because the opener may be redrawn.

import { Refused } from "../api/api.js";
import { freshId, h, replace } from "../base/dom.js";
import { sentence } from "../base/format.js";

/**
 * Open a dialog. `body(close)` returns its content; `close(value)` ends it. Resolves to that value,
 * null after Esc.
 * `kind`: "" for a question, "drawer" for something to read at the side. `stays`: it is not about
 * the page, and stays open when the address changes.
 */
export function openDialog({ title, body, kind = "", back = null, stays = false }) {
  const opener = document.activeElement;
  const id = freshId("dialog");
  return new Promise((resolve) => {
    let value = null;
    const close = (given = null) => {
      value = given;
      dialog.close();
    };
    const dialog = h(
      "dialog",
      { class: `dialog ${kind}`, "aria-labelledby": id, "data-stays": stays },
      h(
        "header",
        { class: "dialog-head" },
        h("h2", { id, tabindex: -1 }, title),
        h(
          "button",
          { type: "button", class: "plain close", "aria-label": "Close", onclick: () => close() },
          "\u00d7",
        ),
      ),
    );
    dialog.append(body(close, dialog));
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) close(); // on the backdrop: its parts fill the dialog's own box
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (dialog.dataset.left) {
        resolve(null); // the next page has the focus
        return;
      }
      const target = back?.() ?? opener;
      if (target?.isConnected) target.focus();
      else document.getElementById("main").focus();
      resolve(value);
    });
    document.body.append(dialog);
    dialog.showModal();
    const first = dialog.querySelector("[autofocus]") ?? dialog.querySelector("h2");
    first.focus();
  });
}

/** Close what is open over a page that is left: it must not act on the next one. */
export function closeDialogs() {
  /** @type {NodeListOf<HTMLDialogElement>} */
  const dialogs = document.querySelectorAll("dialog[open]:not([data-stays])");
  for (const dialog of dialogs) {
    dialog.dataset.left = "yes";
    dialog.close();
  }
}

/**
 * Ask a question with one button that acts. `act(say)` runs while the dialog is open; a refusal is
 * shown in it, and the dialog stays open. Resolves to the result of `act`, or null.
 */
export function ask({ title, text = null, button, danger = false, fields = null, act }) {
  return openDialog({
    title,
    body(close) {
      const trouble = h("div", { class: "trouble", role: "alert" });
      const progress = h("p", { class: "soft", role: "status" });
      const go = h("button", { type: "submit", class: danger ? "danger" : "primary" }, button);
      const cancel = h(
        "button",
        { type: "button", onclick: () => close(), autofocus: true },
        "Cancel",
      );
      const form = h(
        "form",
        { class: "dialog-body" },
        text,
        fields?.element,
        trouble,
        progress,
        h("div", { class: "dialog-foot" }, cancel, go),
      );
      form.addEventListener("submit", async (event) => {
        event.preventDefault();
        go.disabled = true;
        replace(trouble);
        try {
          close((await act(fields?.values(), (text) => replace(progress, text))) ?? true);
        } catch (fault) {
          replace(progress);
          if (!fields?.refuse?.(fault)) replace(trouble, troubleOf(fault));
          go.disabled = false;
          go.focus();
        }
      });
      return form;
    },
  });
}

/** Format an error: what happened, and what to do. */
export function troubleOf(fault) {
  if (!(fault instanceof Refused) && fault.name !== "Mistyped") {
    console.error(fault);
    return h("p", null, `The console failed: ${fault.message}`);
  }
  return [
    h("p", null, sentence(fault.message)),
    fault.advice ? h("p", { class: "soft" }, sentence(fault.advice)) : null,
  ];
}

/** Announce a result and show it for a while. */
export function notice(text, { bad = false, href = "", link = "" } = {}) {
  const place = document.querySelector("[data-notices]");
  const gone = () => note.remove();
  const note = h(
    "div",
    { class: bad ? "notice bad" : "notice" },
    h("span", null, text, href ? [" ", h("a", { href, onclick: gone }, link)] : null),
    h(
      "button",
      { type: "button", class: "plain", "aria-label": "Dismiss", onclick: gone },
      "\u00d7",
    ),
  );
  place.append(note);
  setTimeout(gone, bad ? 12000 : 6000);
}

/** Run an action that may be refused, outside a dialog. */
export async function attempt(act) {
  try {
    return await act();
  } catch (fault) {
    notice(
      fault instanceof Refused
        ? [fault.message, fault.advice].map(sentence).join(" ").trim()
        : String(fault),
      { bad: true },
    );
    return null;
  }
}
