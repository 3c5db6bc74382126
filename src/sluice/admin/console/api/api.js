// The REST API as functions. Sends the credentials, and turns refusals into errors with the
// server's message and advice. Knows nothing of pages: `onSignIn` registers the callback for
// missing credentials.

const BASE = "/api/v1";
const STORED = "sluice.authorization";

let askForCredentials = null;
let asking = null;
let unstored = ""; // where storage is forbidden: lasts until the page is reloaded

/** A refusal by the server, or no response at all (status 0). */
export class Refused extends Error {
  constructor(status, code, message, advice) {
    super(message);
    this.status = status;
    this.code = code;
    this.advice = advice;
  }
}

/**
 * `ask(refusal)` shows the sign-in dialog and resolves to the value of an Authorization header, or
 * null when it is dismissed.
 */
export function onSignIn(ask) {
  askForCredentials = ask;
}

export const bearerAuthorization = (token) => `Bearer ${token}`;

/** Names and passwords may have any characters: Basic carries them as UTF-8. */
export function basicAuthorization(name, password) {
  const bytes = new TextEncoder().encode(`${name}:${password}`);
  return `Basic ${btoa(String.fromCharCode(...bytes))}`;
}

/** The stored value of the Authorization header, or "". */
export function authorization() {
  try {
    return sessionStorage.getItem(STORED) ?? unstored;
  } catch {
    return unstored;
  }
}

/** Store it for this tab only: never in localStorage, a cookie or an address. */
export function keepAuthorization(value) {
  unstored = value;
  try {
    if (value) sessionStorage.setItem(STORED, value);
    else sessionStorage.removeItem(STORED);
  } catch {
    // Storage may be forbidden.
  }
}

/** Open one dialog for all requests that were refused at the same time. */
export async function signIn(refusal) {
  if (!askForCredentials) return false;
  asking ??= askForCredentials(refusal).finally(() => (asking = null));
  const given = await asking;
  if (given) keepAuthorization(given);
  return Boolean(given);
}

export function headers(more = {}) {
  const carried = authorization();
  return carried ? { ...more, Authorization: carried } : more;
}

/** Send a request without a sign-in dialog; the live stream has its own. */
export async function open(path, options = {}) {
  let answer;
  try {
    answer = await fetch(BASE + path, {
      ...options,
      headers: headers(options.headers),
      credentials: "omit",
      cache: "no-store",
    });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new Refused(
      0,
      "unreachable",
      "The broker does not answer.",
      "Check that the broker is running and that this address is correct.",
    );
  }
  if (!answer.ok) throw await refusalOf(answer);
  return answer;
}

async function refusalOf(answer) {
  let body = {};
  try {
    body = await answer.json();
  } catch {
    // Not JSON: a proxy answered in place of the broker.
  }
  const message =
    typeof body.message === "string" ? body.message : `The broker answered ${answer.status}.`;
  return new Refused(
    answer.status,
    body.error ?? "",
    message,
    typeof body.do === "string" ? body.do : "",
  );
}

async function request(method, path, body, signal) {
  const options = { method, signal };
  if (body !== undefined) {
    options.headers = { "Content-Type": "application/json" };
    options.body = JSON.stringify(body);
  }
  for (;;) {
    try {
      const answer = await open(path, options);
      return answer.status === 204 ? null : await answer.json();
    } catch (fault) {
      if (!(fault instanceof Refused && fault.status === 401 && (await signIn(fault)))) throw fault;
    }
  }
}

/**
 * Encode one level of a path. Browsers drop `.` and `..`, encoded or not, which changes the path.
 */
function level(name) {
  if (name === "." || name === "..") {
    throw new Refused(
      0,
      "dots_in_path",
      `A browser cannot request something that is called ${name}.`,
      "Use the command line or a program.",
    );
  }
  return encodeURIComponent(name);
}

/**
 * Write `$` for the slashes of a queue's name in a path, so that no proxy takes them for levels.
 */
export function inPath(name) {
  return level(name.replaceAll("/", "$"));
}

function query(values) {
  const given = Object.entries(values).filter(
    ([, value]) => value !== "" && value !== null && value !== undefined,
  );
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

const queue = (name) => `/queues/${inPath(name)}`;
const id = level;
const target = (name, group) => (group ? `${queue(name)}/groups/${id(group)}` : queue(name));

export const api = {
  whoami: () => request("GET", "/whoami"),
  samples: () => request("GET", "/samples"),
  queueSamples: (name) => request("GET", `${queue(name)}/samples`),
  listeners: () => request("GET", "/listeners"),
  nodes: () => request("GET", "/nodes"),
  cluster: () => request("GET", "/cluster"),
  queue: (name) => request("GET", queue(name)),
  createQueue: (config) => request("POST", "/queues", config),
  deleteQueue: (name) => request("DELETE", queue(name)),
  config: (name) => request("GET", `${queue(name)}/config`),
  configure: (name, changes) => request("PUT", `${queue(name)}/config`, changes),
  pause: (name, group, reason) => request("POST", `${target(name, group)}/pause`, { reason }),
  resume: (name, group) => request("POST", `${target(name, group)}/resume`),
  seek: (name, group, to) => request("POST", `${queue(name)}/groups/${id(group)}/seek`, { to }),
  messages: (name, where) => request("GET", `${queue(name)}/messages${query(where)}`),
  cancelMessage: (name, message) => request("DELETE", `${queue(name)}/messages/${id(message)}`),
  rescheduleMessage: (name, message, when) =>
    request("POST", `${queue(name)}/messages/${id(message)}/reschedule`, when),
  publish: (name, message) => request("POST", `${queue(name)}/messages`, message),
  trace: (name, message) => request("GET", `${queue(name)}/messages/${id(message)}`),
  find: (message) => request("GET", `/messages/${id(message)}`),
  purge: (name) => request("POST", `${queue(name)}/purge`),
  owners: (where) => request("GET", `/ecq${query(where)}`),
  owner: (client) => request("GET", `/ecq/${id(client)}`),
  ownerValues: (client, where) => request("GET", `/ecq/${id(client)}/values${query(where)}`),
  purgeOwner: (client) => request("POST", `/ecq/${id(client)}/purge`),
  clients: (where) => request("GET", `/clients${query(where)}`),
  client: (client) => request("GET", `/clients/${id(client)}`),
  kickClient: (client, endSession) =>
    request("DELETE", `/clients/${id(client)}${query({ end_session: endSession })}`),
  deadLetters: (name, filter) => request("GET", `${queue(name)}/dlq${query(filter)}`),
  deadLetter: (name, deadLetter) => request("GET", `${queue(name)}/dlq/${id(deadLetter)}`),
  deadLetterErrors: (name, filter) => request("GET", `${queue(name)}/dlq-errors${query(filter)}`),
  retryDeadLetter: (name, deadLetter, options) =>
    request("POST", `${queue(name)}/dlq/${id(deadLetter)}/retry`, options),
  deleteDeadLetter: (name, deadLetter) => request("DELETE", `${queue(name)}/dlq/${id(deadLetter)}`),
  retryDeadLetters: (name, filter) => request("POST", `${queue(name)}/dlq/retry`, filter),
  purgeDeadLetters: (name, filter) => request("POST", `${queue(name)}/dlq/purge`, filter),
  diagnosis: (name, group = "") => request("GET", `${queue(name)}/diagnosis${query({ group })}`),
};

/** Return a list that is the whole answer, or the field `key` of it. */
export function listOf(answer, key) {
  if (Array.isArray(answer)) return answer;
  if (Array.isArray(answer?.[key])) return answer[key];
  return Object.values(answer ?? {}).find(Array.isArray) ?? [];
}
