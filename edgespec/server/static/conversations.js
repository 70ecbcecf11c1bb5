// Conversations, kept in this browser.

const KEY = "conversation ";

export function begun() {
  return { id: `${Date.now()}-${crypto.getRandomValues(new Uint32Array(1))[0]}`, at: 0, system: "", messages: [], replaced: [] };
}

/** Whether the browser keeps it; one without messages is not kept. */
export function keep(conversation) {
  try {
    if (conversation.messages.length) localStorage.setItem(KEY + conversation.id, JSON.stringify(conversation));
    else remove(conversation);
    return true;
  } catch {
    return false;
  }
}

export function remove({ id }) { localStorage.removeItem(KEY + id); }

export function isKept({ id }, key) { return key === KEY + id; }

export function find(id) {
  try {
    const found = JSON.parse(localStorage.getItem(KEY + id));
    return found?.messages.length ? found : null;
  } catch {
    return null;
  }
}

/** All that are kept, the last used first. */
export function all() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(KEY)).map((key) => key.slice(KEY.length));
  return ids.map(find).filter(Boolean).sort((one, other) => other.at - one.at);
}

export function title({ messages }) { return messages[0]?.content.replace(/\s+/g, " ").slice(0, 60) ?? "New conversation"; }

/** Ask `text` in place of the messages from `start` on; the answer, which is empty yet. */
export function ask(conversation, text, start) {
  const answer = { role: "assistant", content: "" };
  conversation.at = Date.now();
  conversation.replaced = conversation.messages.splice(start);
  conversation.messages.push({ role: "user", content: text }, answer);
  return answer;
}

/** If nothing was written, take the question back: its text, or "" if it stands in the conversation again; else null. */
export function settle(conversation) {
  const { messages, replaced } = conversation, answer = messages.at(-1);
  conversation.replaced = [];
  if (!answer || answer.content || answer.reasoning_content) return null;
  const [{ content }] = messages.splice(-2);
  messages.push(...replaced);
  return replaced[0]?.content === content ? "" : content;
}
