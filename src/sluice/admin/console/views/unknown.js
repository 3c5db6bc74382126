// The page for an unknown address.

import { h } from "../base/dom.js";
import { to } from "../base/router.js";
import { pageHead } from "../parts/widgets.js";

export function unknownPage() {
  return {
    title: "Not found",
    element: h(
      "div",
      { class: "page" },
      pageHead("There is no such page"),
      h("p", null, "The address may be cut off. ", h("a", { href: to.overview() }, "All queues")),
    ),
  };
}
