// The console's frame: one live stream, one history, one page at a time. Pages get `app` and return
// { element, title, tick?, detail?, navigate?, destroy? }.

import { api, authorization, keepAuthorization, onSignIn } from "./api/api.js";
import { learnAddresses, learnUser } from "./base/commands.js";
import { closeDialogs } from "./parts/dialogs.js";
import { h, replace, setAttribute, setText } from "./base/dom.js";
import { span } from "./base/format.js";
import { History } from "./api/history.js";
import { Live } from "./api/live.js";
import { to, watch } from "./base/router.js";
import { askForCredentials } from "./parts/sign_in.js";
import { clientPage, clientsPage } from "./views/clients.js";
import { messageTracePage } from "./views/messages/message_trace.js";
import { findPage } from "./views/messages/find.js";
import { nodesPage } from "./views/nodes.js";
import { overviewPage } from "./views/overview.js";
import { ownerPage, ownersPage } from "./views/owners.js";
import { queuePage } from "./views/queues/queue.js";
import { unknownPage } from "./views/unknown.js";

const PAGES = {
  overview: overviewPage,
  queue: queuePage,
  message: messageTracePage,
  find: findPage,
  nodes: nodesPage,
  clients: clientsPage,
  client: clientPage,
  owners: ownersPage,
  owner: ownerPage,
  unknown: unknownPage,
};
const PLACES = {
  nodes: "nodes",
  owners: "ecq",
  owner: "ecq",
  clients: "clients",
  client: "clients",
}; // all other pages are about queues
const ROLES = ["viewer", "operator", "admin"];

const main = document.getElementById("main");
/** @type {(name: string) => HTMLElement} */
const part = (name) => document.querySelector(`[data-${name}]`);

export const app = {
  history: new History(),
  node: null,
  queues: new Map(),
  hasSample: false, // whether the stream has sent a sample
  who: null,
  live: null,

  /** Whether the role allows it; an unknown role counts as yes, since the server decides anyway. */
  may(role) {
    const own = this.who?.role;
    if (own === undefined || own === null) return true;
    const rank = typeof own === "number" ? own : ROLES.indexOf(String(own).toLowerCase()) + 1;
    return rank === 0 || rank >= ROLES.indexOf(role) + 1;
  },

  /** A button that needs a role; without it, it is disabled and says why. */
  button(label, role, act, kind = "") {
    const allowed = this.may(role);
    return h(
      "button",
      {
        type: "button",
        class: kind,
        disabled: !allowed,
        title: allowed ? null : `Needs the role ${role}`,
        onclick: act,
      },
      label,
    );
  },
};

let page = null;
let first = true;

function show(route) {
  closeDialogs();
  if (page?.navigate?.(route)) {
    setTitle();
    return;
  }
  page?.destroy?.();
  page = PAGES[route.page](app, route);
  replace(main, page.element);
  app.live.follow(page.queue ?? "");
  setTitle();
  /** @type {NodeListOf<HTMLElement>} */
  const links = document.querySelectorAll("[data-place]");
  for (const link of links)
    setAttribute(
      link,
      "aria-current",
      link.dataset.place === (PLACES[route.page] ?? "queues") ? "page" : null,
    );
  if (app.hasSample) page.tick?.();
  // Focus the new page's heading, as after a load; on the first page the browser does it.
  if (!first) {
    window.scrollTo(0, 0);
    (main.querySelector("h1") ?? main).focus({ preventScroll: true });
  }
  first = false;
}

function setTitle() {
  document.title = page.title ? `${page.title} \u2013 Sluice` : "Sluice";
}

function handleEvent(name, value) {
  if (name === "queues") {
    app.node = value.node;
    app.queues = new Map(value.queues.map((queue) => [queue.name, queue]));
    app.history.add(value.node, value.queues);
    app.hasSample = true;
    showLosses(value.node.losses ?? 0);
    page?.tick?.();
  } else if (name === "queue") page?.detail?.(value);
}

/** Show a banner while a loss of committed frames is not confirmed by an operator. */
function showLosses(cells) {
  const band = part("losses");
  if (cells && band.hidden)
    replace(
      band,
      h("strong", null, "The store has lost frames that it had confirmed."),
      h("span", null, " See what is known of them with "),
      h("code", null, "sluice losses list"),
      h("span", null, ", then confirm with "),
      h("code", null, "sluice losses confirm"),
      h("span", null, "."),
    );
  band.hidden = !cells;
}

const LINK = {
  connecting: "Connecting",
  live: "Live",
  lost: "Connection lost",
  "signed-out": "Signed out",
};
let lostSince = 0;
let counting = 0;

/** Show a lost connection in words beside the brand, in a banner, and by graying old figures. */
function linkState(state, nextTry) {
  setText(part("link"), LINK[state]);
  setAttribute(part("link"), "data-state", state);
  document.documentElement.classList.toggle("stale", state === "lost");
  const band = part("lost");
  clearInterval(counting);
  if (state === "lost") {
    lostSince ||= Date.now();
    const rest = h("span", { "aria-hidden": "true" });
    const again = h("button", { type: "button", onclick: () => app.live.retry() }, "Try now");
    if (band.hidden)
      replace(
        band,
        h("strong", null, "Connection to the broker lost."),
        h("span", null, " Showing the last known values. "),
        rest,
        again,
      );
    else replace(band.querySelector("[aria-hidden]"));
    band.hidden = false;
    const tell = () =>
      setText(
        band.querySelector("[aria-hidden]"),
        `Lost for ${span(Math.floor((Date.now() - lostSince) / 1000) || 0)}, next try in ` +
          `${Math.max(0, Math.ceil((nextTry - Date.now()) / 1000))} s. `,
      );
    tell();
    counting = setInterval(tell, 1000);
  } else if (state === "live") {
    if (lostSince) page?.restored?.();
    lostSince = 0;
    band.hidden = true;
  }
}

async function loadIdentity() {
  try {
    app.who = await api.whoami();
    learnAddresses(await api.listeners());
    learnUser(authorization().startsWith("Basic ") ? app.who.name : "");
  } catch {
    app.who = null;
  }
  const own = app.who;
  const role = typeof own?.role === "number" ? ROLES[own.role - 1] : own?.role;
  replace(
    part("who"),
    own && !own.anonymous
      ? [h("span", { class: "wide-only", title: `Role: ${role}` }, `${own.name} (${role})`), " "]
      : null,
    own && authorization()
      ? h("button", { type: "button", class: "plain", onclick: signOut }, "Sign out")
      : null,
    own ? null : h("button", { type: "button", onclick: () => app.live.retry() }, "Sign in"),
  );
}

function signOut() {
  keepAuthorization("");
  location.reload();
}

function wireTheme() {
  const button = part("theme-switch");
  const root = document.documentElement;
  const next = { auto: "light", light: "dark", dark: "auto" };
  const tell = () => {
    const now = root.dataset.theme ?? "auto";
    replace(button, "Theme: ", now);
    setAttribute(button, "aria-label", `Theme: ${now}. Switch to ${next[now]}`);
    setAttribute(button, "title", `Switch to ${next[now]}`);
  };
  button.addEventListener("click", () => {
    const chosen = next[root.dataset.theme ?? "auto"];
    if (chosen === "auto") delete root.dataset.theme;
    else root.dataset.theme = chosen;
    try {
      localStorage.setItem("sluice.theme", chosen);
    } catch {
      // Not remembered where storage is forbidden.
    }
    tell();
  });
  tell();
}

function wireSearch() {
  const form = part("search");
  const input = form.querySelector("input");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const id = input.value.trim();
    if (id) location.hash = to.find(id);
  });
  document.addEventListener("keydown", (event) => {
    const at = event.target;
    const typing =
      at instanceof Element && at.closest("input, textarea, select, [contenteditable]");
    if (
      event.key === "/" &&
      !typing &&
      !event.ctrlKey &&
      !event.metaKey &&
      !event.altKey &&
      !document.querySelector("dialog[open]")
    ) {
      event.preventDefault();
      input.focus();
      input.select();
    }
  });
}

function start() {
  onSignIn(async (refusal) => {
    const given = await askForCredentials(refusal);
    if (given) setTimeout(loadIdentity);
    return given;
  });
  part("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address after # belongs to the pages
    main.focus();
  });
  wireTheme();
  wireSearch();
  app.live = new Live(linkState, handleEvent);
  const loadHistory = async () => app.history.backfill(null, await api.samples());
  loadIdentity().finally(() => {
    loadHistory().catch(() => null); // charts then begin now
    watch(show);
    app.live.start();
  });
}

start();
