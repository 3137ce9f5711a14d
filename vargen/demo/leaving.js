(() => {
  // Gradio keeps a stream open while a page is open. A browser may keep a page that was left, for Back, and with it one of its six
  // connections to an address, for which later pages then wait. So a page closes its streams when it is left.
  const open = window.fetch;
  const left = new AbortController();
  window.fetch = (resource, options = {}) => {
    if (!/\/(heartbeat\/|queue\/data)/.test(resource.url ?? resource)) return open(resource, options);
    const signals = [left.signal, options.signal].filter(Boolean);
    return open(resource, { ...options, signal: AbortSignal.any(signals) });
  };
  addEventListener("pagehide", () => left.abort());
  addEventListener("pageshow", (event) => event.persisted && location.reload());
})();
