// mqtt.js against a broker: node client.js URL VERSION NAME [CA-FILE]
// Performs the steps of a client in order and prints the results as one line of JSON.
// Its exit code tells of a failure.
const fs = require("node:fs");
const mqtt = require("mqtt");

const [url, version, name, ca] = process.argv.slice(2);
const five = version === "5";
const open = [];

async function connect(clientId, options = {}) {
  const client = await mqtt.connectAsync(url, {
    clientId,
    protocolVersion: Number(version),
    reconnectPeriod: 0,
    connectTimeout: 10_000,
    ca: ca ? fs.readFileSync(ca) : undefined,
    ...options,
  });
  open.push(client);
  client.waiting = [];
  client.got = [];
  client.on("message", (topic, payload, packet) => {
    const message = { topic, payload: payload.toString(), qos: packet.qos, retain: packet.retain };
    if (packet.properties) message.properties = packet.properties;
    client.waiting.length ? client.waiting.shift()(message) : client.got.push(message);
  });
  return client;
}

const next = (client) =>
  client.got.length
    ? Promise.resolve(client.got.shift())
    : new Promise((done) => client.waiting.push(done));

async function run() {
  const seen = {};
  const client = await connect(name);
  await client.subscribeAsync(`${name}/#`, { qos: 2 });
  seen.messages = [];
  for (const qos of [0, 1, 2]) {
    await client.publishAsync(`${name}/${qos}`, `m${qos}`, { qos });
    seen.messages.push(await next(client));
  }
  await client.publishAsync(`${name}/large`, "x".repeat(300_000), { qos: 1 });
  seen.large = (await next(client)).payload.length;

  await client.publishAsync(`${name}/kept`, "kept", { qos: 1, retain: true });
  await next(client);
  const late = await connect(`${name}-late`);
  await late.subscribeAsync(`${name}/kept`, { qos: 1 });
  seen.retained = await next(late);
  await client.publishAsync(`${name}/kept`, "", { qos: 1, retain: true });
  await next(client);

  const mortal = await connect(`${name}-mortal`, {
    will: { topic: `${name}/will`, payload: "gone", qos: 1 },
  });
  mortal.on("error", () => {});
  mortal.stream.destroy();
  seen.will = await next(client);

  const lasting = { clean: false, properties: five ? { sessionExpiryInterval: 300 } : undefined };
  const away = await connect(`${name}-away`, lasting);
  await away.subscribeAsync(`${name}/away`, { qos: 1 });
  await away.endAsync();
  await client.publishAsync(`${name}/away`, "waited", { qos: 1 });
  // Messages of a resumed session may come before `connectAsync` returns, so listen from the start.
  seen.resumed = await new Promise((done) => {
    const back = mqtt.connect(url, {
      clientId: `${name}-away`,
      protocolVersion: Number(version),
      reconnectPeriod: 0,
      ca: ca ? fs.readFileSync(ca) : undefined,
      ...lasting,
    });
    open.push(back);
    back.on("connect", (connack) => (seen.present = connack.sessionPresent));
    back.on("message", (topic, payload) => done(payload.toString()));
  });

  if (five) {
    const reader = await connect(`${name}-reader`);
    await reader.subscribeAsync(`${name}/properties`, {
      qos: 1,
      properties: { subscriptionIdentifier: 9 },
    });
    await client.publishAsync(`${name}/properties`, "x", {
      qos: 1,
      properties: {
        contentType: "text/plain",
        responseTopic: "answers",
        correlationData: Buffer.from("7"),
        messageExpiryInterval: 60,
        userProperties: { a: ["1", "2"], b: "3" },
      },
    });
    const { properties } = await next(reader);
    properties.correlationData = properties.correlationData.toString();
    seen.properties = properties;
  }
  console.log(JSON.stringify(seen));
}

run()
  .then(() => Promise.all(open.map((client) => client.endAsync(true))))
  .then(() => process.exit(0))
  .catch((fault) => {
    console.error(fault);
    process.exit(1);
  });
