"""The APIs that the gateway serves, each a pure translation.

base      what every API is made of: a Dialect reads bodies, a Writer writes answers
request   a request in the gateway's own form
events    what happens to a request while it is answered
problems  errors as clients expect them
form      the forms that an answer can be held to: JSON by a schema, calls of tools
openai/, responses/, anthropic/, ollama/  one API each
"""
