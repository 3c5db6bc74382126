// The server's diagnosis: the cause and what helps, then further findings. Fetched every few
// seconds while it is visible; redrawn only when it changed.

import { api } from "../../api/api.js";
import { h, replace, setText } from "../../base/dom.js";
import { localTime } from "../../base/format.js";
import { advice, failed, loading, prose, tag } from "../../parts/widgets.js";

const EVERY = 5000;

export class DoctorCard {
  constructor(name) {
    this.name = name;
    this.alive = true;
    this.timer = 0;
    this.key = "";
    this.place = h("div", null, loading("the diagnosis"));
    this.when = h("span", { class: "soft num" });
    // Announced when it changes; the text beside it has ages.
    this.verdict = h("span", { role: "status" });
    this.element = h(
      "section",
      { class: "card", "aria-label": "Doctor" },
      h("div", { class: "card-head" }, h("h2", null, "Doctor"), this.verdict, this.when),
      this.place,
    );
    this.load();
  }

  async load() {
    clearTimeout(this.timer);
    try {
      const diagnosis = await api.diagnosis(this.name);
      if (!this.alive) return;
      setText(this.when, `checked at ${localTime(new Date())}`);
      const key = JSON.stringify(diagnosis);
      if (key !== this.key && !this.place.contains(document.activeElement)) {
        this.key = key;
        this.#show(diagnosis);
      }
    } catch (fault) {
      if (!this.alive) return;
      this.key = "";
      replace(this.verdict);
      replace(this.place, failed(fault));
    }
    this.timer = setTimeout(() => this.load(), EVERY);
  }

  destroy() {
    this.alive = false;
    clearTimeout(this.timer);
  }

  #show({ healthy, findings }) {
    const [first, ...others] = findings;
    const open = this.place.querySelector("details")?.open;
    const word = healthy ? "healthy" : (first?.code ?? "unwell");
    if (this.verdict.textContent !== word)
      replace(this.verdict, tag(word, healthy ? "good" : "bad"));
    replace(
      this.place,
      first ? finding(first, "finding main") : h("p", null, "Messages flow."),
      others.length
        ? h(
            "details",
            { open },
            h("summary", null, `Further findings (${others.length})`),
            others.map((other) => finding(other, "finding")),
          )
        : null,
    );
  }
}

function finding(one, kind) {
  return h(
    "div",
    { class: `${kind} ${one.is_fault ? "fault" : ""}` },
    h("p", null, prose(one.what)),
    advice(one.do),
  );
}
