// A consumer in mqtt.js alone, without Sluice's library: take a job, do it, acknowledge it.
//
// node examples/consumer_mqttjs.js [mqtt://localhost:1883 [COUNT]] (or SLUICE_MQTT).
// It first publishes two jobs to itself, and ends after COUNT jobs, by default 2. npm install mqtt
const mqtt = require("mqtt");

const QUEUE = "$queue/examples/mqttjs";
const url = process.argv[2] || process.env.SLUICE_MQTT || "mqtt://localhost:1883";
let left = Number(process.argv[3] || 2);

async function main() {
  const client = await mqtt.connectAsync(url, { clientId: "mqttjs-1", protocolVersion: 5 });
  client.on("message", async (topic, payload, packet) => {
    const received = packet.properties.userProperties;
    const settle = {
      "message-id": received["message-id"],
      "delivery-token": received["delivery-token"],
    };
    let verb = "$ack";
    try {
      console.log(`${payload}, attempt ${received.attempt}`);
    } catch (fault) {
      verb = "$nack"; // redelivered after its backoff; "$reject" for a permanent failure
      settle.description = String(fault);
    }
    await client.publishAsync(`${topic}/${verb}`, "", {
      qos: 1,
      properties: { userProperties: settle },
    });
    left -= 1;
    if (left === 0) await client.endAsync();
  });
  // All consumers that name this group share it; up to ten jobs are prefetched.
  const options = { "consumer-group": "mqttjs", prefetch: "10" };
  await client.subscribeAsync(QUEUE, { qos: 1, properties: { userProperties: options } });
  for (const job of ["resize cat.png", "resize dog.png"])
    await client.publishAsync(QUEUE, job, { qos: 1 });
}

main();
