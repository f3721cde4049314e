// Requests to the server, with the token; and its streams, which are opened again when they break.

const KEY = "k8sjob-token";

/** The token of the address, kept for this tab alone and taken out of the address bar. */
export function takeToken() {
  const given = location.hash.match(/^#token=([\w-]+)$/);
  if (given) {
    sessionStorage.setItem(KEY, given[1]);
    history.replaceState(null, "", "#/");
  }
}

const headers = () => ({ Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` });

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers() });
  } catch {
    throw new Error("k8sjob ui does not respond; is it still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw Object.assign(new Error(body.error ?? `the server returned ${response.status}`), { status: response.status });
}

export const read = async (path) => (await ask(path)).json();
export const blob = async (path) => (await ask(path)).blob();
export const change = async (path) => (await ask(path, { method: "POST" })).json();
export const jobPath = (key, part) => `/api/jobs/${encodeURIComponent(key)}/${part}`;

const PAUSE_MS = 1500;
const HIDDEN_MS = 5000;

/**
 * Follow a stream of server-sent events until close() is called or the stream says that it ended.
 *
 * A browser opens six connections to a server, so a tab that nobody sees holds none.
 *
 * @param handlers by the name of an event; `open` is called before the first event of each
 *     connection, `state` with "live", "ended" or why there is no connection.
 */
export function follow(path, handlers) {
  let controller = null, closed = false, ended = false, hiddenTimer = 0, retryTimer = 0;

  async function connect() {
    clearTimeout(retryTimer);
    if (closed || ended || controller || document.hidden) return;
    const mine = (controller = new AbortController());
    let why = "the connection was closed";
    try {
      const response = await ask(path, { signal: mine.signal });
      handlers.open?.();
      handlers.state?.("live");
      for await (const [name, data] of events(response.body)) {
        if (mine.signal.aborted) return;
        if (name === "end") ended = true;
        else handlers[name]?.(data);
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      why = error.message;
      if (error.status === 401 || error.status === 404) ended = true;
    }
    if (controller === mine) controller = null;
    handlers.state?.(ended && why === "the connection was closed" ? "ended" : why);
    if (!closed && !ended) retryTimer = setTimeout(connect, PAUSE_MS);
  }

  function disconnect() {
    controller?.abort();
    controller = null;
  }

  function visible() {
    clearTimeout(hiddenTimer);
    if (document.hidden) hiddenTimer = setTimeout(disconnect, HIDDEN_MS);
    else connect();
  }

  document.addEventListener("visibilitychange", visible);
  connect();
  return {
    close() {
      closed = true;
      clearTimeout(retryTimer);
      document.removeEventListener("visibilitychange", visible);
      disconnect();
    },
  };
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    parts.push(value);
    if (!value.includes("\n")) continue;
    const blocks = parts.join("").split("\n\n");
    parts = [blocks.pop()];
    for (const block of blocks) {
      const name = block.match(/^event: (.*)$/m)?.[1];
      const data = block.match(/^data: (.*)$/m)?.[1];
      if (name && data) yield [name, JSON.parse(data)];
    }
  }
}
