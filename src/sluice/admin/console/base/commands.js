// Command lines to paste: completed with the addresses of this very broker where they differ from
// the defaults of the programs. The server's commands name no address.

const DEFAULT_URL = "http\u003a//127.0.0.1:8080";
const LOOPBACK = new Set(["localhost", "127.0.0.1", "::1", "[::1]"]);
const ANY = new Set(["0.0.0.0", "::", "[::]", "*"]);
// Commands of `sluice` that use MQTT as well, and those that do not talk to a broker.
const MQTT_COMMANDS = new Set(["consume", "worker", "bench"]);
const FILE_COMMANDS = new Set(["serve", "user", "token", "rules", "hash-password"]);

let mqtt = null; // { host, port } of the MQTT listener
let user = ""; // who signed in with a password, which is also one for MQTT

/** Remember the listeners of the broker, as `GET /listeners` returns them. */
export function learnAddresses(listeners) {
  const found = /^(.*):(\d+)$/.exec(listeners?.mqtt ?? "");
  if (!found) return;
  const host = ANY.has(found[1]) ? location.hostname : found[1];
  mqtt = { host: host.replace(/^\[|\]$/g, ""), port: Number(found[2]) };
}

/** Remember a user whose name and password clients need. */
export function learnUser(name) {
  user = name;
}

/** Quote a word for a shell. */
export function quoted(word) {
  return /^[\w./:@=,+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

/** `mosquitto_pub` or `mosquitto_sub` for a topic at QoS 1, with further arguments. */
export function mosquitto(program, topic, ...more) {
  return ["mosquitto_" + program, "-q", "1", "-t", quoted(topic), ...more].join(" ");
}

/** Add the addresses to one command line. */
export function complete(line) {
  const words = line.split(" ");
  if (/^mosquitto_(pub|sub)$/.test(words[0])) {
    const where = [];
    if (mqtt && !LOOPBACK.has(mqtt.host)) where.push("-h", mqtt.host);
    if (mqtt && mqtt.port !== 1883) where.push("-p", String(mqtt.port));
    if (user) where.push("-u", quoted(user), "-P", '"$SLUICE_PASSWORD"');
    return [words[0], ...where, ...words.slice(1)].join(" ");
  }
  if (words[0] !== "sluice" || FILE_COMMANDS.has(words[1])) return line;
  const added = [];
  if (location.origin !== DEFAULT_URL && !line.includes(" --url "))
    added.push("--url", location.origin);
  if (MQTT_COMMANDS.has(words[1]) && mqtt && !line.includes(" --mqtt ")) {
    const host = mqtt.host.includes(":") ? `[${mqtt.host}]` : mqtt.host;
    const sameHost = mqtt.host === location.hostname;
    if (mqtt.port !== 1883 || !sameHost) added.push("--mqtt", `${host}:${mqtt.port}`);
  }
  return [line, ...added].join(" ");
}
