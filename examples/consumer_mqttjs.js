// A consumer in mqtt.js alone, without Sluice's library: take a job, do it, say so.
//
// node examples/consumer_mqttjs.js [mqtt://localhost:1883 [COUNT]] (or SLUICE_MQTT). It publishes two jobs to itself
// first, and ends after COUNT of them, 2 unless given. npm install mqtt
const mqtt = require("mqtt");

const QUEUE = "$queue/examples/mqttjs";
const url = process.argv[2] || process.env.SLUICE_MQTT || "mqtt://localhost:1883";
let left = Number(process.argv[3] || 2);

async function main() {
  const client = await mqtt.connectAsync(url, { clientId: "mqttjs-1", protocolVersion: 5 });
  client.on("message", async (topic, payload, packet) => {
    const told = packet.properties.userProperties;
    const settle = { "message-id": told["message-id"], "delivery-token": told["delivery-token"] };
    let verb = "$ack";
    try {
      console.log(`${payload}, attempt ${told.attempt}`);
    } catch (fault) {
      verb = "$nack"; // again after its backoff; "$reject" if it would fail for ever
      settle.description = String(fault);
    }
    await client.publishAsync(`${topic}/${verb}`, "", { qos: 1, properties: { userProperties: settle } });
    left -= 1;
    if (left === 0) await client.endAsync();
  });
  // The group is shared with every other consumer that names it; ten jobs may wait here.
  const wishes = { "consumer-group": "mqttjs", prefetch: "10" };
  await client.subscribeAsync(QUEUE, { qos: 1, properties: { userProperties: wishes } });
  for (const job of ["resize cat.png", "resize dog.png"]) await client.publishAsync(QUEUE, job, { qos: 1 });
}

main();
