// The server closes the stream of results when no event is left. Until gradio has read that, it opens no other one for a new event,
// whose result then never comes. So a stream that closes while an event waits is connected again.
(() => {
  const open = window.fetch;
  const waiting = new Set(); // events of which either the answer that names them or the end was seen
  const saw = (event) => waiting.delete(event) || waiting.add(event);
  window.fetch = async (resource, options = {}) => {
    const [, kind] = /\/queue\/(data|join)/.exec(resource.url ?? resource) ?? [];
    const connect = () => open(resource, options);
    const answer = await connect();
    if (kind === "join" && answer.ok) saw((await answer.clone().json()).event_id);
    if (kind !== "data" || !answer.ok) return answer;
    const start = (out) => void relay(answer, connect, out).catch((error) => out.error(error));
    return new Response(new ReadableStream({ start }), answer);
  };
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
