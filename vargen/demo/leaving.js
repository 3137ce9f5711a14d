(() => {
  // Gradio keeps a stream open while a page is open. A browser may keep a page that was left, for Back, and with it one of its six
  // connections to an address, for which later pages then wait. So a page closes its streams when it is left.
  const open = window.fetch;
  const streams = new Set();
  window.fetch = (resource, options = {}) => {
    if (!/\/(heartbeat\/|queue\/data)/.test(resource.url ?? resource)) return open(resource, options);
    const stream = new AbortController();
    streams.add(stream);
    options.signal?.addEventListener("abort", () => stream.abort());
    return open(resource, { ...options, signal: stream.signal });
  };
  addEventListener("pagehide", () => streams.forEach((stream) => stream.abort()));
  addEventListener("pageshow", (event) => event.persisted && location.reload());
})();
