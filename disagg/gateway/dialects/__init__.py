"""The APIs that the gateway serves, each a translation that reads nothing but, for Ollama, the clock.

base      a request in the gateway's own form, what happens to it, and what translates both: a Dialect and its Writer
problems  errors as clients expect them
form      the forms that an answer can be held to: JSON by a schema, calls of tools
reasoning  how OpenAI's APIs turn a model's reasoning on and off
openai    what OpenAI's APIs share: chat with chat_tools, completions, and responses with responses_writer
tools     the tools of chats and responses
anthropic, anthropic_writer  Anthropic's messages
tokens    calls for the tokens of a prompt
managing  how long models stay loaded, and the calls that load, unload, pull and delete them
ollama    Ollama's chat and generate
"""
