(() => {
  // Gradio keeps a stream open while a page is open. A browser may keep a page that was left, for Back, and with it one of its six
  // connections to an address, for which later pages then wait. So a page closes its streams when it is left.
  const open = window.fetch;
  const streams = new Set();
  window.fetch = async (resource, options = {}) => {
    const [, kind] = /\/(heartbeat\/|queue\/data|queue\/join)/.exec(resource.url ?? resource) ?? [];
    if (!kind || kind === "queue/join") {
      const answer = await open(resource, options);
      if (kind && answer.ok) saw((await answer.clone().json()).event_id);
      return answer;
    }
    const stream = new AbortController();
    streams.add(stream);
    options.signal?.addEventListener("abort", () => stream.abort());
    const connect = () => open(resource, { ...options, signal: stream.signal });
    const answer = await connect();
    if (kind !== "queue/data" || !answer.ok) return answer;
    const start = (out) => void relay(answer, connect, out).catch((error) => out.error(error));
    return new Response(new ReadableStream({ start }), answer);
  };
  addEventListener("pagehide", () => streams.forEach((stream) => stream.abort()));
  addEventListener("pageshow", (event) => event.persisted && location.reload());

  // The server closes the stream of results when no event is left. Until gradio has read that, it opens no other one for a new
  // event, whose result then never comes: a click is lost. So a stream that closes while an event waits is connected again.
  const waiting = new Set(); // events of which either the answer that names them or the end was seen
  const saw = (event) => waiting.delete(event) || waiting.add(event);
  const relay = async (answer, connect, out) => {
    const messages = (from) => from.body.pipeThrough(new TextDecoderStream()).getReader();
    let reader = messages(answer);
    let rest = "";
    for (let part; !(part = await reader.read()).done; ) {
      const lines = (rest + part.value).split("\n\n");
      rest = lines.pop();
      for (const line of lines) {
        const { msg, event_id } = JSON.parse(line.slice("data: ".length));
        if (msg === "process_completed") saw(event_id);
        if (msg === "close_stream" && waiting.size) reader = messages(await connect());
        else out.enqueue(new TextEncoder().encode(`${line}\n\n`));
      }
    }
    out.close();
  };
})();
