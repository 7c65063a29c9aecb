"""Where a decode host gets the KV of a prompt: held from earlier requests, received from a prefill host, or computed.

source         the sources of one request
memory         reserves room for the KV of prompt and answer; requests wait for it in turn
slots          tickets that requests wait at for KV from a prefill host
local_prefill  whether this host computes the rest itself
"""
