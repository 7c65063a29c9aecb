"""From an engine's tokens to the events of an answer: its text, the model's reasoning, calls of tools.

answer      decode steps to events, and how an answer begins
choose      the Output of a request
part        what an Output is; all text is the answer
marked      models that mark reasoning and calls in their text
harmony     gpt-oss, whose answers have channels
forced      answers that are, or may be, one call in an envelope
grammar     the grammar of answers that must have a form
scores      the scores of a prompt's tokens to events
tool_calls  a call from what the model has written
"""
