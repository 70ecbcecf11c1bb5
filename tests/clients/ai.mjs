// The AI SDK with its default provider: a task with one tool.
import { createOpenAI } from "@ai-sdk/openai";
import { jsonSchema, stepCountIs, streamText, tool } from "ai";
import { writeFileSync } from "node:fs";

const [baseURL, prompt] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const write = tool({
  description: "Write a file.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { path: { type: "string" }, text: { type: "string" } },
    required: ["path", "text"],
    additionalProperties: false,
  }),
  execute: ({ path, text }) => (writeFileSync(path, text), "written"),
});
const { textStream } = streamText({
  model: openai("tiny"),
  prompt,
  tools: { write },
  stopWhen: stepCountIs(5),
  onError: ({ error }) => console.log(`error: ${error}`),
});
for await (const piece of textStream) process.stdout.write(piece);
