// A payload as text, indented JSON or bytes. It is data: shown, never interpreted.

import { h, replace } from "../base/dom.js";
import { bytes } from "../base/format.js";

const HEX_LIMIT = 16384; // bytes shown as hex
const TEXT_LIMIT = 262144;

export function payloadBytes(message) {
  const raw = atob(message.payload_base64 ?? "");
  return Uint8Array.from(raw, (char) => char.charCodeAt(0));
}

/** Return the payload as a JSON value, otherwise undefined. A cut payload is not JSON. */
function asJson(text) {
  if (text === null || text === undefined || !/^\s*[[{"]/.test(text)) return undefined;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return undefined;
  }
}

/** The first characters, for a table. */
export function preview(message, length = 90) {
  if (message.size === 0) return h("span", { class: "soft" }, "empty");
  if (message.payload === null || message.payload === undefined)
    return h("span", { class: "soft" }, `${bytes(message.size)} of binary data`);
  const line = message.payload
    .slice(0, length * 2)
    .replace(/\s+/g, " ")
    .trim();
  return h(
    "code",
    { class: "preview" },
    line.length > length ? `${line.slice(0, length)}\u2026` : line,
  );
}

export function hexDump(data) {
  const lines = [];
  for (let at = 0; at < Math.min(data.length, HEX_LIMIT); at += 16) {
    const row = [...data.slice(at, at + 16)];
    const codes = row.map((byte) => byte.toString(16).padStart(2, "0"));
    const left = codes.slice(0, 8).join(" ").padEnd(23);
    const right = codes.slice(8).join(" ").padEnd(23);
    const shown = row
      .map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : "."))
      .join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${left}  ${right}  ${shown}`);
  }
  if (data.length > HEX_LIMIT) lines.push(`\u2026 ${bytes(data.length - HEX_LIMIT)} more`);
  return lines.join("\n");
}

/** The payload with a switch between its formats. */
export function payloadView(message) {
  const data = payloadBytes(message);
  const json = asJson(message.payload);
  const forms = [];
  if (json !== undefined) forms.push(["JSON", () => json]);
  if (message.payload !== null && message.payload !== undefined)
    forms.push(["Text", () => message.payload]);
  forms.push(["Hex", () => hexDump(data)]);
  const code = h("code");
  const show = (nth) => {
    const text = forms[nth][1]();
    replace(code, text.length > TEXT_LIMIT ? `${text.slice(0, TEXT_LIMIT)}\n\u2026` : text);
    buttons.forEach((button, other) => button.setAttribute("aria-pressed", String(other === nth)));
  };
  const buttons = forms.map(([label], nth) =>
    h("button", { type: "button", "aria-pressed": "false", onclick: () => show(nth) }, label),
  );
  const cut =
    data.length < message.size
      ? h("span", { class: "soft" }, `first ${bytes(data.length)} of ${bytes(message.size)}`)
      : h("span", { class: "soft" }, bytes(message.size));
  const view = h(
    "section",
    { class: "payload", "aria-label": "Payload" },
    h(
      "div",
      { class: "payload-head" },
      h("h3", null, "Payload"),
      h("div", { class: "segments", role: "group", "aria-label": "Show the payload as" }, buttons),
      cut,
    ),
    data.length
      ? h("pre", { tabindex: 0, "aria-label": "Payload" }, code)
      : h("p", { class: "soft" }, "This message has no payload."),
  );
  show(0);
  return view;
}
