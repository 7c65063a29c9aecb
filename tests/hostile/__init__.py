"""What hostile callers send, as kits: each puts a new parser or option under it with one line.

answers    what a lying host sends instead of an answer
audit      audits of received KV against peers that lie, and honest ones: tables
bodies     request bodies by the size of their chunks and pieces, their rate and their encoding
heads      requests that a server and a proxy in front of it could read in two ways
peers      prefill engines and hosts that send wrong KV under a right digest
schemas    JSON schemas that grow by depth, width, references, arithmetic and repetition
senders    prefill hosts that send next to nothing of a KV transfer
texts      texts that keep tokenizers and templates busy, and parsers of tool calls
work       what requests make a host do beside its engine, and the most that it takes: a table
"""
