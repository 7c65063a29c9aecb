"""The decode server, and where it gets the KV of a prompt: held from earlier requests, received, or computed.

service    POST /decode and POST /generate
handoff    the slots in which requests wait for KV from a prefill host, and what follows if that fails
spans      which layers of a prompt a prefill host computes, by measured speeds
planner    what this host knows when it plans that
prompt_kv  where the KV of one request comes from
audits     what was found of the KV of each prefill host: whom this host audits, within which bounds
memory     reserves room for the KV of prompt and answer; requests wait for it in turn
"""
