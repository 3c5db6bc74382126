// Addresses of the console, after the #: page, queue and message. One table for both directions.
//
//   #/                                    overview
//   #/clients                             clients and sessions
//   #/clients/<client>                    one client
//   #/ecq                                 owners of exclusive queues
//   #/ecq/<client>                        the values of one owner
//   #/nodes                               nodes
//   #/find/<id>                           find a message
//   #/queues/<name>                       a queue
//   #/queues/<name>/messages              its messages
//   #/queues/<name>/messages/<id>         one message
//   #/queues/<name>/dead-letters[?open=]  dead letters
//   #/queues/<name>/config                settings

const TABS = new Set(["messages", "dead-letters", "config"]);

const part = encodeURIComponent;

export const to = {
  overview: () => "#/",
  nodes: () => "#/nodes",
  clients: () => "#/clients",
  client: (client) => `#/clients/${part(client)}`,
  owners: () => "#/ecq",
  owner: (client) => `#/ecq/${part(client)}`,
  find: (id) => `#/find/${part(id)}`,
  queue: (name, tab = "") => `#/queues/${part(name)}${tab ? `/${tab}` : ""}`,
  message: (name, id) => `#/queues/${part(name)}/messages/${part(id)}`,
  deadLetter: (name, id) => `#/queues/${part(name)}/dead-letters?open=${part(id)}`,
};

/** Parse an address to { page, ... }; page is "unknown" for an invalid one. */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  let parts;
  try {
    parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return { page: "unknown" };
  }
  const [place, name, tab, id] = parts;
  const open = new URLSearchParams(search).get("open") ?? "";
  if (!place) return { page: "overview" };
  if (place === "nodes" && parts.length === 1) return { page: "nodes" };
  if (place === "clients" && parts.length === 1) return { page: "clients" };
  if (place === "clients" && parts.length === 2) return { page: "client", client: name };
  if (place === "ecq" && parts.length === 1) return { page: "owners" };
  if (place === "ecq" && parts.length === 2) return { page: "owner", client: name };
  if (place === "find" && parts.length === 2) return { page: "find", id: name };
  if (place === "queues" && name) {
    if (parts.length === 2) return { page: "queue", name, tab: "" };
    if (parts.length === 3 && TABS.has(tab)) return { page: "queue", name, tab, open };
    if (parts.length === 4 && tab === "messages") return { page: "message", name, id };
  }
  return { page: "unknown" };
}

/** Call `show(route)` now and on every change of the address. */
export function watch(show) {
  const changed = () => show(parse(location.hash));
  window.addEventListener("hashchange", changed);
  changed();
}
