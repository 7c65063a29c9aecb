"""The decode server, and where it gets the KV of a prompt: held from earlier requests, received, or computed.

service        POST /decode and POST /generate
source         where the KV of one request comes from
memory         reserves room for the KV of prompt and answer; requests wait for it in turn
audits         what was found of the KV of each prefill host: whom this host audits, within which bounds
slots          tickets that requests wait at for KV from a prefill host
local_prefill  whether this host computes the rest of a prompt itself
"""
