"""What the tokens of an answer are: its text, the model's reasoning, calls of tools. Pure: tokens in, parts out.

part      what an Output is; all text is the answer
marked    models that mark reasoning and calls in their text
calls     a call from what the model has written
harmony   gpt-oss, whose answers have channels
forced    an answer that is one call, as JSON
grammar   the grammar of an answer that must have a form
choose    the Output of a request
"""
