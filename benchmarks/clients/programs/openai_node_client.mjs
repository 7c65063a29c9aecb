// OpenAI's client for Node.
import { createRequire } from "node:module";

const require = createRequire(`${process.env.CLIENT_FOLDER}/`);
const OpenAI = require("openai").default;
const model = process.env.GATEWAY_MODEL;
const client = new OpenAI({ baseURL: `${process.env.GATEWAY_URL}/v1`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "What is 6 * 7?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 8 }, unit: { type: "string", enum: ["c", "f"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];
const short = { model, messages, max_tokens: 24 };

function need(holds, what) {
  if (!holds) throw new Error(what);
}

const features = {
  async chat() {
    const answer = await client.chat.completions.create(short);
    need(answer.choices[0].message.content, "no text");
  },
  async stream() {
    let usage = null;
    const stream = await client.chat.completions.create({
      ...short, stream: true, stream_options: { include_usage: true },
    });
    for await (const chunk of stream) usage = chunk.usage ?? usage;
    need(usage?.completion_tokens, "no usage");
  },
  async json_schema() {
    const answer = await client.chat.completions.create({
      ...short, max_tokens: 200,
      response_format: { type: "json_schema", json_schema: { name: "weather", schema: parameters, strict: true } },
    });
    need("city" in JSON.parse(answer.choices[0].message.content), "not of the form");
  },
  async forced_tool() {
    const answer = await client.chat.completions.create({ ...short, max_tokens: 200, tools, tool_choice: "required" });
    need(answer.choices[0].message.tool_calls[0].function.name === "weather", "no call");
  },
  async run_tools() {
    const runner = client.chat.completions.runTools({
      ...short, max_tokens: 200, stop: ["\n", "."],
      tools: [{ type: "function", function: { ...tools[0].function, parse: JSON.parse, function: () => "sunny" } }],
    });
    await runner.finalContent();
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: "def add(a, b):", max_tokens: 8 });
    need(answer.choices[0].text, "no text");
  },
  async responses() {
    const answer = await client.responses.create({ model, input: "What is 6 * 7?", max_output_tokens: 24 });
    need(answer.output_text, "no text");
  },
  async models() {
    const listed = await client.models.list();
    need(listed.data.some((one) => one.id === model), "the model is not listed");
  },
  async embeddings() {
    await client.embeddings.create({ model, input: "x" });
  },
};

for (const [feature, call] of Object.entries(features)) {
  try {
    await call();
    console.log(JSON.stringify({ feature, works: true, note: "" }));
  } catch (error) {
    console.log(JSON.stringify({ feature, works: false, note: `${error.constructor.name}: ${error.message}`.slice(0, 300) }));
  }
}
