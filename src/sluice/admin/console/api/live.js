// The broker's live stream (server-sent events), read with fetch because EventSource cannot send a
// token. One stream for the whole console, which reconnects after every end, with growing pauses.

import { Refused, inPath, open, signIn } from "./api.js";

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 4000;
// The broker sends every second: after this long without data the stream is dead.
const SILENCE = 6000;
const UNSEEN = 60000; // a tab that is hidden for this long closes its stream

/**
 * Splits the text of an event stream into { event, data }; an unfinished event is completed later.
 */
export class EventParser {
  constructor() {
    this.rest = "";
  }

  feed(text) {
    const events = [];
    this.rest = (this.rest + text).replaceAll("\r\n", "\n");
    for (let end = this.rest.indexOf("\n\n"); end >= 0; end = this.rest.indexOf("\n\n")) {
      const block = this.rest.slice(0, end);
      this.rest = this.rest.slice(end + 2);
      let event = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (data.length) events.push({ event, data: data.join("\n") });
    }
    return events;
  }
}

/**
 * States: connecting, live, lost, signed-out. Listeners: onstate(state, nextTryAt), onevent(name,
 * value).
 */
export class Live {
  constructor(onstate, onevent) {
    this.onstate = onstate;
    this.onevent = onevent;
    this.queue = "";
    this.pause = FIRST_PAUSE;
    this.stream = null;
    this.timer = 0;
    this.unseen = 0;
    this.stopped = true;
    document.addEventListener("visibilitychange", () => this.#seen());
    window.addEventListener("online", () => this.retry());
  }

  start() {
    this.stopped = false;
    this.#run();
  }

  stop() {
    this.stopped = true;
    clearTimeout(this.timer);
    this.stream?.abort();
    this.stream = null;
  }

  /** Request the detail of one queue as well; "" for none. */
  follow(queue) {
    if (queue === this.queue) return;
    this.queue = queue;
    if (!this.stopped) this.retry();
  }

  /** Reconnect at once. */
  retry() {
    this.stop();
    this.start();
  }

  #seen() {
    clearTimeout(this.unseen);
    if (document.hidden) this.unseen = setTimeout(() => this.stop(), UNSEEN);
    else if (this.stopped) this.start();
  }

  async #run() {
    clearTimeout(this.timer);
    const stream = new AbortController();
    this.stream = stream;
    let silence = 0;
    const restartTimer = () => {
      clearTimeout(silence);
      silence = setTimeout(() => stream.abort("silence"), SILENCE);
    };
    try {
      restartTimer();
      const answer = await open(`/live${this.queue ? `?queue=${inPath(this.queue)}` : ""}`, {
        signal: stream.signal,
        headers: { Accept: "text/event-stream" },
      });
      const parser = new EventParser();
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        restartTimer();
        for (const { event, data } of parser.feed(value)) {
          if (this.stream !== stream) return;
          this.pause = FIRST_PAUSE;
          this.onstate("live", 0);
          this.onevent(event, JSON.parse(data));
        }
      }
      this.#lost(stream);
    } catch (fault) {
      if (this.stream !== stream) return; // a newer stream has replaced it
      if (fault instanceof Refused && fault.status === 401) {
        this.onstate("signed-out", 0);
        if (await signIn(fault)) this.retry();
      } else if (fault instanceof Refused && fault.status === 404 && this.queue) {
        this.queue = ""; // the page of a deleted queue says so itself
        this.retry();
      } else this.#lost(stream);
    } finally {
      clearTimeout(silence);
    }
  }

  #lost(stream) {
    if (this.stream !== stream || this.stopped) return;
    this.onstate("lost", Date.now() + this.pause);
    this.timer = setTimeout(() => this.#run(), this.pause);
    this.pause = Math.min(LONGEST_PAUSE, this.pause * 2);
  }
}
