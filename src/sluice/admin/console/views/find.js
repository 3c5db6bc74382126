// Where a message is known, by its id alone. One queue: straight to its life there.

import { api } from "../api.js";
import { h, replace } from "../dom.js";
import { to } from "../router.js";
import { command, empty, failed, loading, pageHead } from "../widgets.js";

export function findPage(app, route) {
  const place = h("div", null, loading("where it is"));
  let alive = true;
  const look = async () => {
    try {
      const { queues } = await api.find(route.id);
      if (!alive) return;
      if (queues.length === 1) location.replace(to.message(queues[0], route.id));
      else if (queues.length > 1)
        replace(
          place,
          h("p", null, "Several queues know a message with this id:"),
          h(
            "ul",
            { class: "choices" },
            queues.map((name) => h("li", null, h("a", { href: to.message(name, route.id) }, name))),
          ),
        );
      else replace(place, unknown(route.id));
    } catch (fault) {
      if (alive) replace(place, fault.status === 404 ? unknown(route.id) : failed(fault, look));
    }
  };
  look();
  return {
    title: "Find a message",
    element: h("div", { class: "page" }, pageHead(route.id, { trail: [["Queues", to.overview()]] }), place),
    destroy: () => (alive = false),
  };
}

function unknown(id) {
  return empty(
    "No queue knows a message with this id",
    h(
      "p",
      null,
      "It was never stored here, or every group has settled it so long ago that its life is forgotten. An id is the publisher's ",
      h("code", null, "message-id"),
      " property, or the one that Sluice gave it; both stand on every delivery.",
    ),
    h("p", null, "The same question on the command line:"),
    command(`sluice explain ${quoted(id)}`),
  );
}

/** As one word of a shell. */
function quoted(word) {
  return /^[\w./:@-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}
